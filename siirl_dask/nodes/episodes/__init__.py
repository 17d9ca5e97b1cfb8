"""Nodes in which a policy acts over several turns: environments, agents, and the rows of their
episodes.
"""

__all__ = ["agents"]
