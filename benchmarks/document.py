"""The comparison as a page of documentation: text, plot and raw records."""

from __future__ import annotations

import json
import platform
from collections.abc import Sequence
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import matplotlib as mpl
import psutil
from matplotlib import pyplot as plt

from report import (
    COLUMNS,
    Record,
    cases_of,
    cells_of,
    comparison_cells,
    fastest,
    limits_of,
    name_of_case,
)

_PACKAGES = (
    "siirl_dask",
    "dask",
    "distributed",
    "pyarrow",
    "numpy",
    "ray",
    "TransferQueue",
    "tensordict",
    "torch",
    "verl",
)
_DETAILS = (
    "method",
    "median ms",
    "min",
    "max",
    "GB/s",
    "CPU s/GB",
    "memory x",
    "driver bytes",
    "right",
)
# the page from here on is written by hand, and stays when it is made anew
_BY_HAND = "## Where the time goes"
_HOW_TO_READ = """\
Every destination holds its rows and has touched every page of them; in every round all bytes were compared with what a
single process gives. Times are medians over the rounds, in milliseconds, by the driver's clock; in brackets, how many
times as long as ours. Of Ray's references (numpy, Arrow) and of TransferQueue's tensors (dense, jagged) the faster is
shown. *memcpy* copies the payload once within a process, *loopback* moves it once between two over a TCP socket, both
with buffers that were used before. [benchmarks/README.md](../../benchmarks/README.md) says what each method does.
"""
_COLUMNS_EXPLAINED = """\
*CPU* is that of all processes; *memory x* the most that was in use at a time beyond what was there before, pools
included, over the payload; *driver bytes* what went through the driver's process, Dask's scheduler included; *right*
says whether all bytes were, and in the rows' order.
"""


def write_document(folder: Path, results: Path, records: Sequence[Record], command: str) -> None:
    """Write the page and its plot to ``folder``, the raw records to ``results``."""
    for place in (folder, results):
        place.mkdir(parents=True, exist_ok=True)
    (results / "dataplane.json").write_text(json.dumps(list(records), indent=1) + "\n")
    page = folder / "dataplane.md"
    by_hand = page.read_text().partition(_BY_HAND) if page.exists() else ("", "", "")
    page.write_text("\n".join(filter(None, (_page(records, command), "".join(by_hand[1:])))))
    _plot(folder / "dataplane.png", records)


def _page(records: Sequence[Record], command: str) -> str:
    first = records[0]
    parts = [
        "# The data plane next to others",
        f"Rows change hands once, from {first['wfrom']} workers to {first['wto']} on one "
        f"machine.\n\n{_HOW_TO_READ}",
        _comparison(records),
        "![Medians of every method and case](dataplane.png)",
        f"## The machine\n\n{_machine()}. {_noise(records)}.\n\n{_versions()}.",
        f"Measured on {date.today():%d %B %Y}. To repeat it:\n\n    {command}",
        f"## Every method\n\n{_COLUMNS_EXPLAINED}",
        *(f"### {name}\n\n{_details(case)}" for name, case in cases_of(records).items()),
    ]
    errors = [
        f"* {name_of_case(r)}, {r['peer']}: `{_one_line(r['error'])}`"
        for r in records
        if "error" in r
    ]
    if errors:
        parts += ["## What failed\n\n" + "\n".join(errors)]
    return "\n\n".join(part.strip("\n") for part in parts) + "\n"


def _comparison(records: Sequence[Record]) -> str:
    lines = [["rows x tokens", "MiB", "memcpy", "loopback", *COLUMNS]]
    for name, case in cases_of(records).items():
        size = f"{case[0]['payload_bytes'] / 2**20:.0f}"
        lines.append([name, size, *limits_of(case), *comparison_cells(case)])
    return _markdown(lines)


def _details(case: Sequence[Record]) -> str:
    lines = [list(_DETAILS), *(cells_of(record) for record in case)]
    return _markdown([line + [""] * (len(_DETAILS) - len(line)) for line in lines])


def _markdown(lines: Sequence[Sequence[str]]) -> str:
    heading, *rows = lines
    rule = ["---", *("---:" for _ in heading[1:])]
    return "\n".join(f"| {' | '.join(line)} |" for line in (heading, rule, *rows))


def _machine() -> str:
    memory = psutil.virtual_memory().total / 2**30
    system = f"{platform.system()} {platform.release()}"
    return f"{psutil.cpu_count()} cores ({_processor()}), {memory:.0f} GiB of memory, {system}"


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    names = [
        line.partition(":")[2].strip()
        for line in cpuinfo.read_text().splitlines()
        if "model name" in line
    ]
    return names[0] if names else platform.machine()


def _noise(records: Sequence[Record]) -> str:
    most = max(record["cores_elsewhere"] for record in records)
    return f"Other things kept at most {most:.2f} of its cores busy meanwhile"


def _versions() -> str:
    return f"Python {platform.python_version()}, " + ", ".join(
        f"{name} {_version(name)}" for name in _PACKAGES
    )


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "(not installed)"


def _one_line(error: str) -> str:
    return " ".join(error.replace("`", "'").split())[:300]


def _plot(path: Path, records: Sequence[Record]) -> None:
    mpl.use("agg")
    cases = cases_of(records)
    figure, axes = plt.subplots(figsize=(11, 5), layout="constrained")
    width = 0.8 / len(COLUMNS)
    for index, (label, methods) in enumerate(COLUMNS.items()):
        seconds = [fastest(case, methods) for case in cases.values()]
        bars = [(place, value * 1e3) for place, value in enumerate(seconds) if value is not None]
        places = [place - 0.4 + (index + 0.5) * width for place, _ in bars]
        axes.bar(
            places,
            [value for _, value in bars],
            width,
            label=label,
            color=plt.get_cmap("tab10")(index),
        )
    starts, ends = ([place + shift for place in range(len(cases))] for shift in (-0.45, 0.45))
    memcpy, loopback = (
        [case[0][key] * 1e3 for case in cases.values()] for key in ("memcpy_s", "loopback_s")
    )
    axes.hlines(memcpy, starts, ends, colors="black", linestyles=":", label="memcpy (limit)")
    axes.hlines(loopback, starts, ends, colors="black", linestyles="--", label="loopback (limit)")
    axes.set_yscale("log")
    axes.set_ylabel("median, ms")
    axes.set_xticks(
        range(len(cases)),
        [f"{name}\n{c[0]['payload_bytes'] / 2**20:.0f} MiB" for name, c in cases.items()],
    )
    axes.legend(ncols=4, fontsize="small", loc="upper left")
    axes.margins(y=0.3)
    figure.savefig(path, dpi=120)
    plt.close(figure)
