"""Progress, heartbeats, traces and gauges of a worker while it works."""

__all__ = ["prometheus", "scheduler_patience", "task_progress", "work"]
