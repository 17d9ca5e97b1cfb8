"""The page of runs from their folders alone, by a server of its own; no scheduler is needed."""

__all__ = ["server"]
