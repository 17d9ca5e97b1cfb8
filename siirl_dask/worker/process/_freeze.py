"""Freezes the garbage collector; the process that workers are forked from imports this last.

Modules imported by then stay out of collections. Each collection would otherwise take half a second
to go through them, and copy the pages that the workers share.
"""

import gc

from siirl_dask.worker.process.report import report

report()  # each worker is asked for it: it reads all files of this package
gc.collect()
gc.freeze()
