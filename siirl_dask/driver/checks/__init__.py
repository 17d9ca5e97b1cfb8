"""Checks before anything starts: the workflow, the data, the models, the number types."""

__all__ = ["number_type", "preflight", "prompt_rows", "reachable"]
