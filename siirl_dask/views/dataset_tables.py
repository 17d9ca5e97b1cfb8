"""Prints datasets: columns, parts, a histogram of lengths, and rows laid out for reading."""

from __future__ import annotations

from statistics import median
from typing import Any

from rich import box
from rich.markup import escape
from rich.table import Table
from rich.text import Text
from siirl_storage import Part, Snapshot

from siirl_dask.datasets import LengthDistribution
from siirl_dask.datasets.summary import DatasetSummary
from siirl_dask.errors import ImageError, counted
from siirl_dask.images.reading import size_of
from siirl_dask.observe import PipeConsole
from siirl_dask.wording import readable_bytes

_BAR = 40  # characters of the longest bar
_PARTS = 5  # parts that are listed
_SHOWN = 800  # characters of a value that are shown
_IMAGES = {b"\x89PNG": "PNG", b"\xff\xd8\xff": "JPEG", b"GIF8": "GIF", b"RIFF": "WebP"}
_ANY_SIZE = 2**62  # pixels: headers alone are read


def print_import(
    console: PipeConsole,
    table: Snapshot,
    lengths: LengthDistribution | None,
    limit: int | None,
) -> None:
    """Print what an import has written, and the prompts' lengths in tokens if they were counted."""
    nbytes = sum(part.nbytes for part in table.parts)
    groups = sum(len(part.groups) for part in table.parts)
    console.print(
        f"{counted(table.num_rows, 'row')}, {readable_bytes(nbytes)} in "
        f"{counted(len(table.parts), 'part')} and "
        f"{counted(groups, 'row group')} are in {escape(table.url)} (version {table.version})",
        soft_wrap=True,
        highlight=False,
    )
    columns = ", ".join(f"{_clean(one.name)}: {one.type}" for one in table.schema)
    console.print(Text(f"columns: {columns}"), soft_wrap=True)
    if lengths is not None:
        print_lengths(console, lengths, "tokens", limit)


def print_summary(
    console: PipeConsole,
    found: DatasetSummary,
    unit: str,
    limit: int | None,
) -> None:
    """Print what ``summarise`` has found; lengths are in ``unit``."""
    size = ""
    if found.parts:
        size = f", {readable_bytes(sum(part.nbytes for part in found.parts))}"
    version = ""
    if found.version is not None:
        version = f", version {found.version}"
    rows = "rows are not counted"
    if found.rows is not None:
        rows = counted(found.rows, "row")
    console.print(Text(f"{found.url}: {rows}{size}{version}", style="bold"), soft_wrap=True)
    if found.parts:
        _print_parts(console, found.parts)
    _print_columns(console, found)
    if found.prompt is not None and found.read:
        console.print(Text(f"\nLengths of {found.prompt}, in {unit}, of {_rows_read(found)}"))
        print_lengths(console, found.lengths, unit, limit)
    for number, row in enumerate(found.samples, 1):
        console.print(Text(f"\nSample {number}", style="bold"))
        for name, value in row.items():
            console.print(Text.assemble((f"{_clean(name)}: ", "cyan"), _readable(value)))


def print_lengths(
    console: PipeConsole,
    lengths: LengthDistribution,
    unit: str,
    limit: int | None,
) -> None:
    """Print a histogram, and how many are longer than ``limit``."""
    if lengths.nulls:
        rows = "1 row has"
        if lengths.nulls != 1:
            rows = f"{lengths.nulls:,} rows have"
        console.print(f"{rows} no prompt: training would fail there", highlight=False)
    if not lengths.count:
        return
    most = max(count for *_, count in lengths.bins())
    table = Table(box=None, show_header=False, padding=(0, 1))
    table.add_column(justify="right")
    table.add_column(justify="right")
    table.add_column()
    for first, last, count in lengths.bins():
        name = f"{first:,}"
        if last is None:
            name += " and more"
        elif last > first:
            name += f" to {last:,}"
        table.add_row(
            name, f"{count:,}", "█" * round(_BAR * count / most) or ("▏" if count else "")
        )
    console.print(table)
    shares = ", ".join(f"{name} {lengths.quantile(share):,}" for name, share in _QUANTILES.items())
    console.print(f"{unit}: {shares}", highlight=False)
    if limit is not None:
        longer = lengths.longer_than(limit)
        console.print(
            f"{longer:,} of {lengths.count:,} prompts ({longer / lengths.count:.2%}) are longer "
            f"than {limit:,} {unit}: training with data.max_prompt_length={limit} drops them",
            highlight=False,
            soft_wrap=True,
        )


_QUANTILES = {"shortest": 0.0, "median": 0.5, "90 %": 0.9, "99 %": 0.99, "longest": 1.0}


def _print_parts(console: PipeConsole, parts: Any) -> None:
    groups = [rows for part in parts for rows in part.groups]
    if groups:
        console.print(
            f"{counted(len(parts), 'part')}, {counted(len(groups), 'row group')} of "
            f"{min(groups):,} to {counted(max(groups), 'row')} (median {median(groups):,.0f})",
            highlight=False,
        )
    table = Table(box=box.SIMPLE_HEAD)
    for head in ("part", "rows", "size", "row groups"):
        table.add_column(head, justify="left" if head == "part" else "right", overflow="fold")
    shown: list[Part] = list(parts[:_PARTS])
    for part in shown:
        table.add_row(
            Text(_clean(part.path)),
            f"{part.rows:,}",
            readable_bytes(part.nbytes),
            f"{len(part.groups):,}",
        )
    if len(parts) > len(shown):
        table.add_row(f"and {len(parts) - len(shown):,} more", "", "", "")
    console.print(table)


def _print_columns(console: PipeConsole, found: DatasetSummary) -> None:
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("column", overflow="fold")
    table.add_column("type", overflow="fold")
    for head in ("nulls", "mean size", "largest"):
        table.add_column(head, justify="right")
    for name, column in found.columns.items():
        mean = ""
        longest = ""
        if column.values:
            mean = f"{column.size / column.values:,.0f}"
            longest = f"{column.longest:,}"
        table.add_row(
            Text(_clean(name)), Text(_clean(str(column.type))), f"{column.nulls:,}", mean, longest
        )
    console.print(table)
    console.print(
        f"Nulls, and sizes in characters or bytes, are those of {_rows_read(found)}.",
        highlight=False,
    )


def _rows_read(found: DatasetSummary) -> str:
    if found.read == found.rows:
        if found.read == 1:
            return "the only row"
        return f"all {found.read:,} rows"
    where = ""
    if found.pieces > 1:
        where = f", from the beginnings of {found.pieces} files"
    if not where:
        return f"the first {found.read:,} rows"
    return f"{found.read:,} rows{where}"


def _readable(value: Any) -> str:
    """Return a value as text for a terminal, shortened, without control characters; blobs by
    kind and size.
    """
    match value:
        case bytes():
            return f"<{_kind(value)}, {readable_bytes(len(value))}>"
        case str():
            text = _clean(value[: _SHOWN + 1])
            if len(value) <= _SHOWN:
                return text
            return f"{text[:_SHOWN]}... ({len(value):,} characters)"
        case {"role": str(role), "content": content}:
            return f"[{_clean(role)}] {_readable(content)}"
        case dict():
            return (
                "{"
                + ", ".join(f"{_clean(str(key))}: {_readable(one)}" for key, one in value.items())
                + "}"
            )
        case [{"role": _, "content": _}, *_]:
            return "\n  ".join(["", *(_readable(one) for one in value)])
        case list():
            more = ""
            if len(value) > 8:
                more = f", ... ({len(value)} items)"
            return "[" + ", ".join(_readable(one) for one in value[:8]) + more + "]"
    return str(value)


def _kind(value: bytes) -> str:
    """Return what a blob is: an image's format, with its width and height where its header tells
    them.
    """
    kind = next((name for head, name in _IMAGES.items() if value.startswith(head)), None)
    if kind is None:
        return "binary"
    try:
        width, height = size_of(value, _ANY_SIZE)
    except ImageError:
        return f"{kind}, damaged"
    return f"{kind}, {width} x {height} pixels"


def _clean(text: str) -> str:
    """Replace what a terminal would take for a command: data is not to be trusted."""
    return "".join(
        sign if sign.isprintable() or sign in "\n\t" else "\N{REPLACEMENT CHARACTER}"
        for sign in text
    )
