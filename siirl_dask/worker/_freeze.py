"""Imported last by the process that workers are forked from: what has been imported stays out of garbage collections,
each of which would go through it for half a second and copy the pages that it shares with the other workers.
"""

import atexit
import gc

gc.collect()
gc.freeze()
atexit.register(gc.unfreeze)  # nanobind, which triton is built with, says at the end that what is frozen was leaked
