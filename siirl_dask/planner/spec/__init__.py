"""DAGs as plain data: names of functions, nodes in YAML, rounds of nodes."""

__all__ = ["ecosystems", "names"]
