"""Readers of a run's trace: its table, timelines, bottlenecks, measured seconds, transfers."""

__all__ = ["bottleneck", "chrome_trace", "step_averages", "trace_table", "transfers"]
