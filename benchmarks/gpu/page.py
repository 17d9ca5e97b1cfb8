"""Makes docs/benchmarks/gpu.md of the lines that first_run.py wrote, with the predictions next to
what was measured.

    python benchmarks/gpu/page.py benchmarks/results/gpu.jsonl

Without a file it makes the page of a day that no GPU has had yet.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import results
from parts import PARTS
from predictions import ROWS, Row

ROOT = Path(__file__).resolve().parents[2]
NOT_MEASURED = "not measured"
_TITLE = "# The first run on a GPU"
_HOW = """\
## To run it

On a machine with a network, from a checkout:

    make gpu-bundle

It makes `.gpu/`: the scripts, and the wheels that a machine with Python 3.12, torch 2.11 and transformers 5.17 lacks,
13 MB. On the machine with the GPU, which needs no network, in the repository's root with `.gpu/` in it:

    OUT=results bash .gpu/first_run.sh
    OUT=results ONLY="bench trl" bash .gpu/first_run.sh     # some groups or parts again

It takes 560 seconds at most (`TOTAL`). `results.jsonl` has a line for each result as soon as it is there, so that a day
that is cut off keeps what it has; `summary.txt` is the same to read, `all.log` and `logs.tgz` are logs and profiles.
`SIIRL_TEST_DEVICE=cpu` rehearses it with tiny models. This page is made of the lines:

    cp results/results.jsonl benchmarks/results/gpu.jsonl
    python benchmarks/gpu/page.py benchmarks/results/gpu.jsonl

The model of the figures has the shape of Qwen2.5-0.5B and random weights in bfloat16, a step has 64 rows of 128 + 384
tokens, and a micro-batch 16,384 tokens. MFU counts 6 operations a parameter and token, and none of attention.
Predictions are for one H100, and were written before any GPU had run this code. Those of `torch` were raised when its
hidden states became bfloat16, by the 1.1 to 1.3 that `fsdp` was to gain over it from having such.
"""
_NONE_YET = "No GPU has run it yet: every figure below is a prediction, and none is measured."
_REHEARSAL = "This is a rehearsal on a CPU with tiny models: its figures say nothing of a GPU."


def page(lines: Sequence[results.Line]) -> str:
    """Return the page of the lines; of each figure and part the last line counts."""
    figures = {line["figure"]: line for line in lines if "figure" in line}
    outcomes = {line["part"]: line for line in lines if "state" in line and line["part"] != "day"}
    sections = [
        _TITLE,
        _introduction(figures.get("machine")),
        _HOW,
        *_machine(figures.get("machine")),
        *_checks(outcomes),
        "## Figures",
        _table(("figure", "predicted", "measured"), (_figure(row, figures) for row in ROWS)),
        *_missing(outcomes, bool(lines)),
    ]
    return "\n\n".join(section.strip("\n") for section in sections) + "\n"


def _introduction(machine: results.Line | None) -> str:
    if machine is None:
        return _NONE_YET
    if machine["on_cpu"]:
        return _REHEARSAL
    return (
        f"One {machine['device']}, and what it did within ten minutes, next to what was expected."
    )


def _machine(machine: results.Line | None) -> Iterator[str]:
    if machine is None:
        return
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    yield "## The machine"
    yield (
        f"{machine['device']}, {machine['memory_gib']:g} GiB of device memory, {machine['cores']} "
        "cores, Python "
        f"{machine['python']}, CUDA {machine['cuda']}; {versions}. Commit {machine['commit']}."
    )


def _checks(outcomes: Mapping[str, results.Line]) -> Iterator[str]:
    tested = [part for part in PARTS if part.tests and part.name in outcomes]
    if not tested:
        return
    yield "## Checks"
    heads = ("part", "state", "passed", "failed", "skipped", "seconds")
    yield _table(heads, (_check(outcomes[part.name]) for part in tested))
    failures = [
        f"* `{name}`" for part in tested for name in outcomes[part.name].get("failures", ())
    ]
    if failures:
        yield "\n".join(["Failed:", "", *failures])
    printed = [f"    {text}" for part in tested for text in outcomes[part.name].get("printed", ())]
    if printed:
        yield "\n".join(["What they printed:", "", *printed])


def _check(line: results.Line) -> tuple[str, ...]:
    if "passed" not in line:
        return (line["part"], line["state"], "", "", "", "")
    failed = line["failed"] + line["error"]
    counts = (line["passed"], failed, line["skipped"], line["seconds"])
    return (line["part"], line["state"], *(str(count) for count in counts))


def _figure(row: Row, figures: Mapping[str, results.Line]) -> tuple[str, str, str]:
    line = figures.get(row.figure, {})
    if row.key not in line:
        return row.label, row.prediction, NOT_MEASURED
    return row.label, row.prediction, _value(line[row.key], percent=row.percent)


def _value(value: Any, *, percent: bool) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(_value(each, percent=percent) for each in value)
    if percent:
        return f"{value:.1%}"
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def _missing(outcomes: Mapping[str, results.Line], any_lines: bool) -> Iterator[str]:
    """Say which parts have no result, and of those that did not pass, how their logs end."""
    if not any_lines:
        return
    absent = [
        f"* {part.name}: it has no line of results" for part in PARTS if part.name not in outcomes
    ]
    unfinished = [line for line in outcomes.values() if line["state"] != "passed"]
    if not absent and not unfinished:
        return
    yield "## What is missing"
    if absent:
        yield "\n".join(absent)
    for line in unfinished:
        why = f": {line['why']}" if "why" in line else ""
        log = "".join(f"\n    {text}" for text in line.get("last", ()))
        yield f"{line['part']} {line['state']}{why}\n{log}"


def _table(heads: Sequence[str], rows: Iterator[tuple[str, ...]]) -> str:
    rule = ["---"] * len(heads)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (heads, rule, *rows))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", type=Path, nargs="?", help="lines of a day (none)")
    parser.add_argument(
        "--out", type=Path, default=ROOT / "docs" / "benchmarks" / "gpu.md", help="the page"
    )
    options = parser.parse_args()
    lines = [] if options.results is None else results.read(options.results)
    options.out.write_text(page(lines))


if __name__ == "__main__":
    main()
