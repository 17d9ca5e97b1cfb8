"""All methods on the same work, in turn: one round that warms up, then the timed ones, then one
that watches memory.

    python benchmarks/rounds.py --rows 256 --tokens 8192 --from 2 --to 4 --json

Every system is up all the time and idle while another is at work, so whatever else the machine does
meets all alike.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

from candidates import all_candidates
from limits import Limits
from method import Candidate, Method, System
from report import print_case
from usage import CpuClock, Elsewhere, memory_bytes, own_processes, peak_memory, warm_free_memory
from work import Oracle, Work, add_arguments, parse_arguments

_WARM = 4  # times the payload: what most methods allocate in a round


@dataclass(slots=True)
class Series:
    """Measurements of one method."""

    name: str
    method: Method | None = None
    """None when its system could not be started."""
    seconds: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    driver_bytes: list[int] = field(default_factory=list)
    verified: bool = True
    in_order: bool = True
    memory_kept: int = 0
    """Bytes by which memory grew over its rounds so far: pools, and whatever else it holds on
    to."""
    memory_peak: int = 0
    """The same while it runs."""
    error: str | None = None


@dataclass(slots=True)
class LimitSeries:
    memcpy: list[float] = field(default_factory=list)
    loopback: list[float] = field(default_factory=list)
    cores_elsewhere: float = 0.0


def measure(
    work: Work, candidates: Sequence[Candidate], n: int, tag: str = ""
) -> list[dict[str, Any]]:
    """One record per method, in the order of the candidates; of one that failed, its error."""
    oracle = Oracle(work)
    limits = LimitSeries()
    with Limits(work.payload_bytes) as machine, _started(work, candidates) as every:
        elsewhere = Elsewhere()
        for number in range(n + 2):
            _say(f"{work}: round {number} of {n + 1}")
            for series in every:
                if series.method is not None and series.error is None:
                    _try_round(series, series.method, oracle, number, last=number == n + 1)
            limits.memcpy.append(machine.memcpy())
            limits.loopback.append(machine.loopback())
        limits.cores_elsewhere = elsewhere.cores()
        return [_record(series, work, limits, tag) for series in every]


@contextmanager
def _started(work: Work, candidates: Sequence[Candidate]) -> Iterator[list[Series]]:
    """Systems are started one after the other and closed in the opposite order."""
    every: list[Series] = []
    with ExitStack() as running:
        for candidate in candidates:
            _say(f"{work}: start {', '.join(candidate.methods)}")
            try:
                system = candidate.build()
                running.callback(_close, system)
                every += [Series(method.name, method) for method in system.start(work)]
            except Exception as error:
                traceback.print_exc()
                every += [Series(name, error=_describe(error)) for name in candidate.methods]
        yield every
        _say(f"{work}: close")


def _close(system: System) -> None:
    """The figures are there already: a system that does not end in order must not cost them."""
    try:
        system.close()
    except Exception:
        traceback.print_exc()


def _try_round(series: Series, method: Method, oracle: Oracle, number: int, *, last: bool) -> None:
    """A method that fails is left out from then on, and its error is what is told of it."""
    try:
        method.before()
        gc.collect()
        warm_free_memory(_WARM * oracle.work.payload_bytes)
        pids = own_processes()
        memory = memory_bytes(pids)
        if last:
            # methods of one system share processes: one may free what the other has kept
            series.memory_peak = max(series.memory_kept, 0) + peak_memory(pids, method.run) - memory
        else:
            _run_timed(series, method, pids, keep=number > 0)
        verdict = oracle.judge(method.check())
        series.verified &= verdict.complete
        series.in_order &= verdict.in_order
        method.after()
        series.memory_kept += memory_bytes(pids) - memory
    except Exception as error:
        traceback.print_exc()
        series.error = _describe(error)


def _run_timed(series: Series, method: Method, pids: Sequence[int], *, keep: bool) -> None:
    cpu = CpuClock(pids)
    start = time.perf_counter()
    method.run()
    seconds = time.perf_counter() - start
    if keep:
        series.seconds.append(seconds)
        series.cpu.append(cpu.seconds())
        series.driver_bytes.append(method.driver_bytes())


def _record(series: Series, work: Work, limits: LimitSeries, tag: str) -> dict[str, Any]:
    payload = work.payload_bytes
    record: dict[str, Any] = {
        "tag": tag,
        "peer": series.name,
        "rows": work.rows,
        "tokens": work.tokens,
        "wfrom": work.sources,
        "wto": work.destinations,
        "pattern": "regroup",
        "ragged": work.ragged,
        "payload_bytes": payload,
        "memcpy_s": round(statistics.median(limits.memcpy), 5),
        "loopback_s": round(statistics.median(limits.loopback), 5),
        "cores_elsewhere": round(limits.cores_elsewhere, 2),
    }
    if series.error is not None:
        return record | {"error": series.error}
    median = statistics.median(series.seconds)
    return record | {
        "n": len(series.seconds),
        "median_s": round(median, 5),
        "min_s": round(min(series.seconds), 5),
        "max_s": round(max(series.seconds), 5),
        "GBps": round(payload / 1e9 / median, 3),
        # the mean: the kernel tells CPU time in hundredths of a second
        "cpu_s_per_GB": round(statistics.mean(series.cpu) / (payload / 1e9), 2),
        "driver_bytes": int(statistics.median(series.driver_bytes)),
        "verified": series.verified,
        "in_order": series.in_order,
        "peak_pss_x": round(series.memory_peak / payload, 2),
    }


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".strip()[:1500]


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_arguments(parser)
    work, arguments = parse_arguments(parser)
    records = measure(work, all_candidates(), arguments.n, arguments.tag)
    if arguments.json:
        for record in records:
            print(json.dumps(record), flush=True)
    else:
        print_case(records)


if __name__ == "__main__":
    main()
