"""Shows runs and plans to people: the page on the dashboard, reports, samples, a terminal,
drawings.

Views read what a run has written, and what the scheduler knows of one under way. Nothing that
trains imports them but the driver, which puts the page on the scheduler and draws the plot at the
end.
"""

__all__ = [
    "charts",
    "dashboard",
    "dataset_tables",
    "plan",
    "report",
    "samples",
    "table_width",
    "watch",
]
