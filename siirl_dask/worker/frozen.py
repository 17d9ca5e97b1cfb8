"""Imported last by the process that workers are forked from: what has been imported stays out of garbage collections,
each of which would go through it for half a second and copy the pages that it shares with the other workers.
"""

import gc

gc.collect()
gc.freeze()
