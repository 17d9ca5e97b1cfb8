"""Readers of a run's trace: its table, timelines, bottlenecks, measured seconds, transfers."""
