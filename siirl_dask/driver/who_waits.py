"""Asks the workers which of them waits for which, on which edge, and what those that hang are doing.

A worker's event loop answers, although its task's thread hangs. Where it does not, the nanny that has started its
process is asked what became of that.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from distributed import Client

from siirl_dask.config import Config
from siirl_dask.errors import Origin, RunError, SilentPeer
from siirl_dask.observe.console import printable
from siirl_dask.worker.run_spec import RunSpec
from siirl_dask.worker.tasks import describe_process, describe_wait

_TIMES_STALL = 1.5  # where all workers are silent, cluster.stall_timeout ends the run first
_ANSWER_TIMEOUT = 2.0  # seconds for a worker, and then for its nanny
_TIMEOUT = 10.0  # seconds for all of them
_ASKED = 64  # workers, at most: those that hang first
_WITH_STACKS = 8  # workers
_SHOWN = 24  # lines about those that wait
_LINES, _CHARACTERS = 60, 200  # of a worker's stacks
_IN_NODE = re.compile(r"node '([\w-]+)', ([^:]+)")  # the place of a task, as worker/node_call.py names it
STOPPED = "stopped"
"""State, as a nanny tells it, of the process of a worker that was stopped by SIGSTOP."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A worker's answer, or what is known of one that gives none."""

    answered: bool
    place: str = ""
    waits: bool = False
    owed: Sequence[tuple[str, str, float]] = ()
    """Worker that owes it an answer, what for, and for how many seconds."""
    stacks: Sequence[str] = ()
    process: str = ""
    """State of its process by the system, where it does not answer and its nanny does."""
    pid: int | None = None


@dataclass(frozen=True, slots=True)
class Waits:
    """Answers of the workers of a run."""

    members: Mapping[str, str]
    answers: Mapping[str, Answer]
    hanging: Sequence[str] = field(default=())
    """Workers in whose nodes nothing gets done."""

    @property
    def mute(self) -> list[str]:
        """Workers that do not answer."""
        return [worker for worker, answer in self.answers.items() if not answer.answered]

    def text(self) -> str:
        """Return lines for the user: who hangs, with its stacks, and who waits for whom."""
        lines = [line for worker in (*self.mute, *self._with_stacks()) for line in self._about(worker)]
        waiting = [line for worker in self.answers if (line := self._wait(worker))]
        if len(waiting) > _SHOWN:
            waiting = [*waiting[:_SHOWN], f"and {len(waiting) - _SHOWN} more that wait"]
        return "\n".join(printable(line) for line in (*lines, *waiting))

    def _with_stacks(self) -> list[str]:
        hanging = [worker for worker in self.hanging if worker in self.answers and worker not in self.mute]
        return hanging[:_WITH_STACKS]

    def _about(self, worker: str) -> list[str]:
        answer, where = self.answers[worker], f"worker {worker!r} at {self.members[worker]}"
        if answer.answered:
            return [f"{where} is in {answer.place or 'no task of the run'}:", *(f"  {line}" for line in answer.stacks)]
        if answer.process == STOPPED:
            return [f"{where} answers nothing: its process was stopped (SIGSTOP); kill -CONT {answer.pid} wakes it"]
        if answer.process:
            return [
                f"{where} answers nothing: its process {answer.pid} is {answer.process}; code may hold Python's lock"
            ]
        return [f"{where} answers nothing: its process was stopped, holds Python's lock, or is cut off"]

    def _wait(self, worker: str) -> str:
        answer = self.answers[worker]
        if not answer.answered or not (answer.waits or answer.owed):
            return ""
        owed = dict[str, tuple[str, float]]()
        for peer, what, seconds in answer.owed:
            if peer not in owed or owed[peer][1] < seconds:
                owed[peer] = what, seconds
        if not owed:
            return f"worker {worker!r} waits in {answer.place or 'a task of the run'} for the others of its group"
        each = [f"worker {peer!r} on edge {what}, for {seconds:.0f} s" for peer, (what, seconds) in owed.items()]
        return f"worker {worker!r} waits for " + " and ".join(each[:4]) + (" and others" if len(each) > 4 else "")


def node_timeout(config: Config) -> float:
    """Return the seconds for which one node on one worker may get nothing done; 0: any time."""
    if config.run.node_timeout is None:
        return _TIMES_STALL * config.cluster.stall_timeout
    return config.run.node_timeout


def failure_of_hang(client: Client, spec: RunSpec, silent: Sequence[Any], place: str) -> RunError:
    """Return the failure of a step in which workers have been silent: SilentPeer, after which the run may be tried
    again, where the process of the first says nothing either. ``silent`` is what the supervisor tells of each: worker,
    place, seconds, and whether heartbeats come.
    """
    (first, where, seconds, _), *others = silent
    waits = _asked(client, spec, [worker for worker, *_ in silent])
    mute = [] if waits is None else waits.mute
    limit = "(run.node_timeout)"
    if waits is None or first in mute:
        name = f"worker {first!r} at {spec.members[first]}"
        failure: RunError = SilentPeer(f"{place}: {name}: no heartbeat for {seconds:.0f} s {limit}{_why(waits, first)}")
        failure.silence = seconds
    else:
        also = [f"on worker {worker!r} in {at or 'no node'}" for worker, at, *_ in others[:_WITH_STACKS]]
        others_too = f", nor {', nor '.join(also)}" if also else ""
        failure = RunError(
            f"{where or place}: nothing got done for {seconds:.0f} s {limit} on worker {first!r}{others_too}"
        )
    failure.origin = _origin(first, where)
    failure.report = "" if waits is None else waits.text()
    return failure


def _origin(worker: str, where: str) -> Origin:
    node = _IN_NODE.match(where)
    return Origin(worker=worker, node=node and node[1], iteration=node and node[2])


def report_on(client: Client, spec: RunSpec, hanging: Sequence[str]) -> str:
    """Return who waits for whom, for the user; an empty text where the scheduler does not pass the question on."""
    waits = _asked(client, spec, hanging)
    return "" if waits is None else waits.text()


def _asked(client: Client, spec: RunSpec, hanging: Sequence[str]) -> Waits | None:
    try:
        return who_waits(client, spec, hanging)
    except OSError:
        return None


def _why(waits: Waits | None, worker: str) -> str:
    answer = None if waits is None else waits.answers[worker]
    stopped = answer is not None and answer.process == STOPPED
    return ": its process was stopped (SIGSTOP)" if stopped else ": its process was stopped, or it is cut off"


def who_waits(client: Client, spec: RunSpec, hanging: Sequence[str]) -> Waits:
    """Ask the workers, those that are ``hanging`` first. OSError where the scheduler does not pass the question on."""
    order = [*hanging, *(worker for worker in spec.members if worker not in hanging)][:_ASKED]
    present = client.scheduler_info(n_workers=-1)["workers"]
    there = [worker for worker in order if spec.members[worker] in present]
    answers = client.sync(_ask_all, client, spec, there, callback_timeout=_TIMEOUT)
    return Waits(spec.members, dict(zip(there, answers, strict=True)), hanging)


async def _ask_all(client: Client, spec: RunSpec, workers: Sequence[str]) -> list[Answer]:
    return await asyncio.gather(*(_ask(client, spec, worker) for worker in workers))


async def _ask(client: Client, spec: RunSpec, worker: str) -> Answer:
    address = spec.members[worker]
    told = await _call(client, address, describe_wait, spec.plugin)
    if told is not None:
        return read_answer(told)
    match await _call(client, address, describe_process, nanny=True):
        case [str(process), int(pid)]:
            return Answer(answered=False, process=process[:40], pid=pid)
    return Answer(answered=False)


async def _call(client: Client, address: str, function: Any, *arguments: Any, nanny: bool = False) -> Any:
    """Return what a worker, or its nanny, answers; None where it does not."""
    call = client.run(function, *arguments, workers=[address], nanny=nanny)
    try:
        return (await asyncio.wait_for(call, _ANSWER_TIMEOUT))[address]
    except Exception:  # a process that stands still, or is just leaving, may break the connection in any way
        return None


def read_answer(told: object) -> Answer:
    """Return an answer that came over the network, cut to bounded size; an empty one where it has another form."""
    match told:
        case {"place": str(place), "waits": bool(waits), "owed": list(owed), "stacks": list(stacks)}:
            rows = [
                (peer[:_CHARACTERS], what[:_CHARACTERS], seconds)
                for peer, what, seconds in (row for row in owed[:_ASKED] if isinstance(row, list) and len(row) == 3)
                if isinstance(peer, str) and isinstance(what, str) and isinstance(seconds, float)
            ]
            lines = [line[:_CHARACTERS] for line in stacks[:_LINES] if isinstance(line, str)]
            return Answer(True, place[:_CHARACTERS], waits, rows, lines)
    return Answer(answered=True)
