"""``siirl-dask report``: writes one HTML file on a run, or on several that are compared."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from siirl_dask.commands.program.outputs import write_output
from siirl_dask.errors import ConfigError
from siirl_dask.views.report.gather import gather
from siirl_dask.views.report.page import page

_MOST = 16  # runs: eight colours, twice
_FILE = "report.html"


def add_report(command: ArgumentParser) -> None:
    """Add the arguments of the command."""
    command.add_argument(
        "runs",
        metavar="RUN",
        nargs="+",
        help="a run's folder or URL; several are compared",
    )
    command.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        default=_FILE,
        help=f"a path or URL; default: {_FILE}",
    )


def write_report(chosen: Namespace) -> None:
    """Write the file, and say where it is. ConfigError without a run, and for a file that cannot
    be written.
    """
    if len(chosen.runs) > _MOST:
        raise ConfigError(
            f"{len(chosen.runs)} runs: expected at most {_MOST}, which can still be told apart"
        )
    runs = gather(chosen.runs)
    content = page(runs).encode()
    write_output(chosen.output, content, option="-o", what="report")
    print(f"{chosen.output} has the report, {len(content) / 1e6:.1f} MB: open it in a browser")
    for run in runs:
        for part, reason in run.missing.items():
            print(f"without the {part} of {run.label}: {reason}")
