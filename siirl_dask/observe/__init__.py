"""Shows and records a run while it goes on: metrics and their backends, progress, a summary, the
end of a run.

Everything here observes and changes nothing. Each function takes ``run.url`` and knows where its
file lies below it.
"""

from siirl_dask.observe.console import PipeConsole, announce, chat_text, printable
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
    agents_with,
    damaged_lines,
    decode,
    last_records,
    merge,
    pack,
    parse_attempts,
    read_attempts,
    read_metrics,
    unpack,
    values,
    whole_lines,
)
from siirl_dask.observe.progress import Pace, Progress, time_left
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
    "Pace",
    "PipeConsole",
    "Progress",
    "Record",
    "Restart",
    "RunFailure",
    "Sample",
    "Slowest",
    "Status",
    "Summary",
    "agents_with",
    "announce",
    "backends",
    "chat_text",
    "damaged_lines",
    "decode",
    "eval_result_table",
    "last_records",
    "merge",
    "pack",
    "parse_attempts",
    "print_end_of_run",
    "print_eval_result",
    "printable",
    "read_attempts",
    "read_metrics",
    "read_summary",
    "summary_altered",
    "tenths",
    "time_left",
    "trace",
    "unpack",
    "values",
    "whole_lines",
    "write_eval_result",
    "write_summary",
]
