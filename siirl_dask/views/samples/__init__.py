"""Samples of a run, as HTML and in a terminal."""

__all__ = ["answer", "page", "terminal"]
