"""Requests by HTTP to servers that a run does not start: they end when nobody waits for them."""

from siirl_dask.http_client.ending_client import EndingClient

__all__ = ["EndingClient"]
