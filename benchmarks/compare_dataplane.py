"""This project's data plane and other systems on the same work, and the page that tells of it.

    python benchmarks/compare_dataplane.py                                  # the four cases, into docs/benchmarks
    python benchmarks/compare_dataplane.py --cases 64x2k --n 3 --out /tmp/x # a quick look

Each case has a process of its own (``rounds.py``), in which all methods take turns.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from document import write_document
from report import OURS, print_comparison
from work import Work

_HERE = Path(__file__).resolve().parent
_CASES = "256x8k,64x64k,256x64k,1024x16k-ragged"
_CASE = re.compile(r"(\d+)x(\d+)(k?)(-ragged)?")


def parse_case(text: str, sources: int, destinations: int) -> Work:
    """``ROWSxTOKENS``, where 8k is 8192 tokens, with ``-ragged`` behind it or not."""
    if not (found := _CASE.fullmatch(text)):
        raise ValueError(f"case {text!r}: expected one such as 256x8k or 1024x16k-ragged")
    tokens = int(found[2]) * (1024 if found[3] else 1)
    return Work(int(found[1]), tokens, sources, destinations, ragged=bool(found[4]))


def run_case(work: Work, n: int) -> list[dict[str, Any]]:
    """The records of all methods on one case."""
    command = [sys.executable, str(_HERE / "rounds.py"), "--json", "--n", str(n)]
    command += ["--rows", str(work.rows), "--tokens", str(work.tokens)]
    command += [
        "--from",
        str(work.sources),
        "--to",
        str(work.destinations),
        *(["--ragged"] if work.ragged else []),
    ]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cases", default=_CASES, help=f"comma between them; default {_CASES}")
    parser.add_argument(
        "--from",
        type=int,
        default=2,
        dest="sources",
        metavar="N",
        help="workers that hold the rows",
    )
    parser.add_argument(
        "--to", type=int, default=4, dest="destinations", metavar="M", help="workers that get them"
    )
    parser.add_argument("--n", type=int, default=7, help="timed rounds, after one that warms up")
    parser.add_argument(
        "--out", type=Path, default=_HERE.parent / "docs" / "benchmarks", help="folder for the page"
    )
    parser.add_argument(
        "--results", type=Path, default=_HERE / "results", help="folder for the raw records"
    )
    return parser


def main() -> None:
    parser = make_parser()
    given = parser.parse_args()
    try:
        cases = [
            parse_case(case, given.sources, given.destinations) for case in given.cases.split(",")
        ]
    except ValueError as error:
        parser.error(str(error))
    records = [record for work in cases for record in run_case(work, given.n)]
    print_comparison(records)
    write_document(given.out, given.results, records, _command(given))
    print(f"{given.out}/dataplane.md, .png; {given.results}/dataplane.json")
    if any(
        "error" in record or not record["verified"] for record in records if record["peer"] == OURS
    ):
        sys.exit(f"{OURS} failed")


def _command(given: argparse.Namespace) -> str:
    """Return the command that measures these figures again, without the output folder."""
    workers = f"--from {given.sources} --to {given.destinations}"
    return f"python benchmarks/compare_dataplane.py --cases {given.cases} {workers} --n {given.n}"


if __name__ == "__main__":
    main()
