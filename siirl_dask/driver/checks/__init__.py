"""Checks before anything starts: the workflow, the data, the models, the number types."""
