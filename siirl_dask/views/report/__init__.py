"""``siirl-dask report``: one HTML page on a run, or on several that are compared."""

__all__ = ["gather", "page"]
