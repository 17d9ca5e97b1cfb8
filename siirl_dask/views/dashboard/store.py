"""Holds what a scheduler knows of the runs on it: a small record per step, and no more than a
bounded number of them.

Everything comes from drivers as plain data, and from workers' events; what is malformed is left
out.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from siirl_dask.observe import MEASURED, Record, Slowest, Status, Summary
from siirl_dask.planner import Phase
from siirl_dask.views.dashboard.live import Live
from siirl_dask.views.dashboard.reader import Reader
from siirl_dask.views.dashboard.records import thinned

MOST_RECORDS = 1000
"""Records of a run that are kept: of a longer one an even choice of the older half."""
MOST_RUNS = 4
_MOST_METRICS = 400
_MOST_MEMBERS = 4096


_LONGEST = 500  # characters of an error, and of a command


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEnding:
    """How a run ended."""

    status: str
    error: str = ""
    resume: str = ""
    """Command that resumes it; empty for a run that is complete, or where it is not known."""
    steps: int = 0
    seconds: float | None = None
    """From the first step's start to the last one's end."""
    slowest: Slowest | None = None

    @staticmethod
    def of(summary: Summary) -> RunEnding:
        """Return what a run's summary says."""
        failure = summary.failure
        resume = None
        if failure is not None:
            resume = failure.resume
        return RunEnding(
            status=str(summary.status),
            error=(summary.error or "")[:_LONGEST],
            resume=(resume or "")[:_LONGEST],
            steps=summary.steps,
            seconds=summary.seconds,
            slowest=summary.slowest,
        )


@dataclass(slots=True)
class LiveRun:
    """A run that has used this scheduler."""

    url: str
    name: str = ""
    plugin: str = ""
    """Name of its plugins, under which workers tell their pulses and events."""
    members: Mapping[str, str] = field(default_factory=dict)
    """{worker: address}, in rank order."""
    steps: int = 0
    """Steps to train."""
    tokenizer: str = ""
    """Path of the model's ``tokenizer.json``; empty where there is none."""
    records: list[Record] = field(default_factory=list)
    tokens: dict[str, float] = field(default_factory=dict)
    """Tokens of the last iteration in which each worker generated any."""
    live: Live = field(default_factory=Live)
    seconds: float = 0.0
    """Seconds of all its steps, validations and tests so far."""
    ended: RunEnding | None = None
    """How it ended; None while it goes on, and where it has not said."""
    version: int = 0
    """Grows with each report of the run."""
    shown: int = -1
    """The version of its end that a browser has got."""
    looked_at: float = float("-inf")
    """When a viewer was shown it last, in seconds of the monotonic clock."""

    @property
    def step(self) -> int:
        """The newest step that was reported; 0 before the first."""
        return max((record["step"] for record in self.records[-3:]), default=0)


class RunStore:
    """The runs that have used this scheduler, the newest last."""

    def __init__(self, reader: Reader | None = None) -> None:
        self.runs: OrderedDict[str, LiveRun] = OrderedDict()
        if reader is None:
            reader = Reader()
        self.reader = reader
        """Reads their folders, for all viewers together."""

    def begin(self, about: Mapping[str, Any]) -> None:
        """Note that a run begins, or is tried again: records of steps after ``done`` are
        forgotten.
        """
        match about:
            case {
                "url": str(url),
                "name": str(name),
                "plugin": str(plugin),
                "members": dict(members),
                "done": int(done),
            }:
                pass
            case _:
                return
        run = self.runs.pop(url, None)
        if run is None:
            run = LiveRun(url)
        run.name = name[:200]
        run.plugin = plugin
        run.members = {
            str(worker): str(address) for worker, address in list(members.items())[:_MOST_MEMBERS]
        }
        steps = about.get("steps")
        if not isinstance(steps, int):
            steps = 0
        run.steps = steps
        tokenizer = about.get("tokenizer")
        if not isinstance(tokenizer, str):
            tokenizer = ""
        run.tokenizer = tokenizer
        run.records = [record for record in run.records if record["step"] <= done and done]
        run.tokens = {}
        run.live = Live()
        run.seconds = sum(record["seconds"] for record in run.records)
        run.ended = None
        run.version += 1
        self.runs[url] = run
        while len(self.runs) > MOST_RUNS:
            self.runs.popitem(last=False)

    def record(self, url: str, record: object) -> None:
        """Add the record of a step, a validation or a test."""
        run = self.runs.get(url)
        checked = _checked(record)
        if run is None or checked is None:
            return
        run.records.append(checked)
        run.seconds += checked["seconds"]
        if len(run.records) > MOST_RECORDS + MOST_RECORDS // 10:  # not for each record
            run.records = thinned(run.records, MOST_RECORDS)
        run.version += 1

    def end(self, url: str, about: Mapping[str, Any]) -> LiveRun | None:
        """Note how a run ended, and return it; None for one that is not known, or without a status
        that there is.
        """
        run = self.runs.get(url)
        status = about.get("status")
        if run is None or status not in set(Status):
            return None
        run.ended = RunEnding(
            status=str(status),
            error=str(about.get("error", ""))[:_LONGEST],
            resume=str(about.get("resume", ""))[:_LONGEST],
            steps=run.step,
        )
        run.version += 1
        return run

    def event(self, topic: object, message: object) -> None:
        """Take what a worker tells its driver at the end of an iteration: how many tokens it
        had.
        """
        match message:
            case {
                "kind": "done",
                "member": str(member),
                "metrics": {"tokens": [_, _, float() | int() as total, *_]},
            }:
                for run in self.runs.values():
                    if run.plugin == topic and member in run.members:
                        run.tokens[member] = float(total)

    def newest(self) -> LiveRun | None:
        """Return the run that began last; None before the first."""
        return next(reversed(self.runs.values()), None)


def _checked(record: object) -> Record | None:
    match record:
        case {
            "step": int(step),
            "phase": phase,
            "seconds": float() | int() as seconds,
            "metrics": dict(metrics),
        } if phase in MEASURED:
            kept = {
                sys.intern(name): value if value is None else float(value)
                for name, value in list(metrics.items())[:_MOST_METRICS]
                if isinstance(name, str) and (value is None or isinstance(value, float | int))
            }
            return Record(step=step, phase=Phase(phase), seconds=float(seconds), metrics=kept)
    return None
