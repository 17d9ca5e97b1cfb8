"""A plan for readers: as text, as plain data, as a drawing."""

from siirl_dask.views.plan.as_json import as_data
from siirl_dask.views.plan.as_svg import draw
from siirl_dask.views.plan.as_text import describe

__all__ = ["as_data", "describe", "draw"]
