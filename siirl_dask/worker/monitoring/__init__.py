"""Progress, heartbeats, traces and gauges of a worker while it works."""
