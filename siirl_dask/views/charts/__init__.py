"""Curves of a run's metrics and how they are drawn: series, scales, colours, figures, layers of
a graph.
"""

__all__ = ["figures", "run_plot", "series"]
