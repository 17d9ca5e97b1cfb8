"""Records as tables on the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

Record = Mapping[str, Any]

OURS = "siirl_dask_auto"
COLUMNS: Mapping[str, tuple[str, ...]] = {
    "ours": (OURS,),
    "ours, messages only": ("siirl_dask_dask",),
    "Ray refs": ("ray_refs", "ray_refs_arrow"),
    "Ray driver": ("ray_driver",),
    "TransferQueue, tuned": ("tq_dense", "tq_jagged"),
    "verl DataProto": ("verl",),
    "verl DataProto, numpy": ("verl_numpy",),
    "Dask graph": ("dask_graph",),
    "Dask P2P": ("dask_p2p",),
}
"""Systems that the comparison shows, each with its methods: the fastest one counts."""
_HEADINGS = ("", "median ms", "min", "max", "GB/s", "CPU s/GB", "memory x", "driver bytes", "right")


def name_of_case(record: Record) -> str:
    tokens = record["tokens"]
    size = f"{tokens // 1024}k" if tokens % 1024 == 0 else str(tokens)
    return f"{record['rows']} x {size}{' ragged' if record['ragged'] else ''}"


def cases_of(records: Iterable[Record]) -> dict[str, list[Record]]:
    """The records of each case, in order."""
    cases: dict[str, list[Record]] = {}
    for record in records:
        cases.setdefault(name_of_case(record), []).append(record)
    return cases


def print_case(records: Sequence[Record]) -> None:
    """One case, one line a method."""
    console, first = Console(width=120), records[0]
    workers = f"{first['wfrom']} -> {first['wto']} workers"
    table = Table(
        title=f"{name_of_case(first)}, {first['payload_bytes'] / 2**20:.0f} MiB, {workers}"
    )
    for heading in _HEADINGS:
        table.add_column(heading, justify="right" if heading else "left")
    for record in records:
        table.add_row(*cells_of(record))
    console.print(table)
    limits = (
        f"memcpy {milliseconds(first['memcpy_s'])} ms, loopback "
        f"{milliseconds(first['loopback_s'])} ms"
    )
    console.print(
        f"At best: {limits}. Cores busy with other things: {first['cores_elsewhere']:.2f}."
    )
    print_errors(records)


def cells_of(record: Record) -> list[str]:
    """A line of a case's table."""
    if "error" in record:
        return [record["peer"], "failed"]
    times = [milliseconds(record[key]) for key in ("median_s", "min_s", "max_s")]
    rates = [f"{record[key]:.2f}" for key in ("GBps", "cpu_s_per_GB", "peak_pss_x")]
    right = "NO" if not record["verified"] else "yes" if record["in_order"] else "unordered"
    return [record["peer"], *times, *rates, f"{record['driver_bytes']:,}", right]


def print_comparison(records: Sequence[Record]) -> None:
    """All cases: medians, and how many times ours fits into each."""
    console = Console(width=150)
    table = Table(title="Medians in ms; below, how many times as long as ours", show_lines=True)
    for heading in ("rows x tokens", "memcpy", "loopback", *COLUMNS):
        lines = heading.replace(" ", "\n").replace("TransferQueue", "Transfer\nQueue")
        table.add_column(lines, justify="right" if heading in COLUMNS else "left")
    for name, case in cases_of(records).items():
        table.add_row(
            name, *limits_of(case), *(cell.replace(" ", "\n") for cell in comparison_cells(case))
        )
    console.print(table)
    print_errors(records)


def print_errors(records: Iterable[Record]) -> None:
    for record in records:
        if "error" in record:
            Console(width=120).print(
                f"{name_of_case(record)}: {record['peer']}: {record['error']}", markup=False
            )


def limits_of(case: Sequence[Record]) -> list[str]:
    return [milliseconds(case[0]["memcpy_s"]), milliseconds(case[0]["loopback_s"])]


def comparison_cells(case: Sequence[Record]) -> list[str]:
    """``milliseconds ratio`` for each of COLUMNS."""
    ours = fastest(case, COLUMNS["ours"])
    return [_comparison_cell(fastest(case, methods), ours) for methods in COLUMNS.values()]


def fastest(case: Sequence[Record], methods: tuple[str, ...]) -> float | None:
    """Median seconds; None when none of the methods came through with the right rows."""
    found = [
        r["median_s"] for r in case if r["peer"] in methods and "error" not in r and r["verified"]
    ]
    return min(found, default=None)


def _comparison_cell(seconds: float | None, ours: float | None) -> str:
    if seconds is None:
        return "failed"
    return milliseconds(seconds) + (f" ({seconds / ours:.1f}x)" if ours and seconds != ours else "")


def milliseconds(seconds: float) -> str:
    value = seconds * 1e3
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"
