"""A worker's process outside of any run: how it starts, and questions to it."""

__all__ = ["fork_server", "probe", "report"]
