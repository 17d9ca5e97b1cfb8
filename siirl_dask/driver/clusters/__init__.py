"""Dask clusters of a run: started or connected to, their workers, the tasks that are sent to
them.
"""

__all__ = ["adaptive"]
