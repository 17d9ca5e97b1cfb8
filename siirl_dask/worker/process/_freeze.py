"""Freezes the garbage collector; the process that workers are forked from imports this last.

Modules imported by then stay out of collections. Each collection would otherwise take half a second
to go through them, and copy the pages that the workers share.
"""

import gc

gc.collect()
gc.freeze()
