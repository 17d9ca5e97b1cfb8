"""``python -m siirl_dask`` is ``siirl-dask``."""

from siirl_dask.cli import main

if __name__ == "__main__":
    main()
