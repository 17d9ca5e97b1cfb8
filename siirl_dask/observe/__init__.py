"""What a run shows and leaves behind of itself: metrics, TensorBoard, progress, a summary, a report and a plot.

Everything here observes. Each function takes ``run.url`` and knows where in it its file lies.
"""

from siirl_dask.observe.eval_result import Standing, render_standing, show_standing, write_standing
from siirl_dask.observe.metrics import (
    MEASURED,
    Message,
    MetricsLog,
    Record,
    merge,
    pack,
    read_metrics,
    unpack,
    values,
)
from siirl_dask.observe.plot import plot_run
from siirl_dask.observe.progress import Progress
from siirl_dask.observe.report import Report, Sample, render_report
from siirl_dask.observe.summary import Accuracy, BytesPerStep, Status, Summary, read_summary, write_summary
from siirl_dask.observe.tensorboard import TensorBoardLog

__all__ = [
    "MEASURED",
    "Accuracy",
    "BytesPerStep",
    "Message",
    "MetricsLog",
    "Progress",
    "Record",
    "Report",
    "Sample",
    "Standing",
    "Status",
    "Summary",
    "TensorBoardLog",
    "merge",
    "pack",
    "plot_run",
    "read_metrics",
    "read_summary",
    "render_report",
    "render_standing",
    "show_standing",
    "unpack",
    "values",
    "write_standing",
    "write_summary",
]
