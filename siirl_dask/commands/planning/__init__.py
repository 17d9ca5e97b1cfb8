"""Parts of ``siirl-dask plan``: hosts, seconds of a step, and what a run has measured."""
