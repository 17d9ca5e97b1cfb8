"""The commands of ``siirl-dask``, one function each."""
