"""Serves a worker's peers and asks them: for rows, shared work and the store of process groups."""

__all__ = ["data_plane"]
