"""Shows and records a run while it goes on: metrics and their backends, progress, a summary, the
end of a run.

Everything here observes and changes nothing. Each function takes ``run.url`` and knows where its
file lies below it.
"""

from siirl_dask.observe.console import PipeConsole, announce, printable
from siirl_dask.observe.drift import Drift
from siirl_dask.observe.end_of_run import EndOfRun, Sample, print_end_of_run
from siirl_dask.observe.eval_result import (
    EVAL_FILE,
    EvalResult,
    eval_result_table,
    print_eval_result,
    write_eval_result,
)
from siirl_dask.observe.metrics import (
    MEASURED,
    METRICS_FILE,
    STEP_SECONDS,
    Message,
    MetricsLog,
    Record,
    damaged_lines,
    merge,
    pack,
    read_metrics,
    unpack,
    values,
)
from siirl_dask.observe.progress import Progress
from siirl_dask.observe.summary import (
    SUMMARY_FILE,
    Accuracy,
    BytesPerStep,
    Restart,
    RunFailure,
    Slowest,
    Status,
    Summary,
    read_summary,
    summary_altered,
    write_summary,
)

__all__ = [
    "EVAL_FILE",
    "MEASURED",
    "METRICS_FILE",
    "STEP_SECONDS",
    "SUMMARY_FILE",
    "Accuracy",
    "BytesPerStep",
    "Drift",
    "EndOfRun",
    "EvalResult",
    "Message",
    "MetricsLog",
    "PipeConsole",
    "Progress",
    "Record",
    "Restart",
    "RunFailure",
    "Sample",
    "Slowest",
    "Status",
    "Summary",
    "agents",
    "announce",
    "backends",
    "damaged_lines",
    "eval_result_table",
    "merge",
    "metrics",
    "pack",
    "print_end_of_run",
    "print_eval_result",
    "printable",
    "progress",
    "read_metrics",
    "read_summary",
    "summary_altered",
    "tenths",
    "trace",
    "unpack",
    "values",
    "write_eval_result",
    "write_summary",
]
