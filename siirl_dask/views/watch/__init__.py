"""``siirl-dask watch``: a run at one moment, read from its URL alone, in a terminal."""

__all__ = ["look", "screen"]
