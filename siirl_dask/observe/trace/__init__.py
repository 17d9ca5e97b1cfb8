"""Readers of a run's trace: its table, timelines, bottlenecks, measured seconds, transfers."""

__all__ = ["bottleneck", "chrome_trace", "measured", "trace_table", "transfers"]
