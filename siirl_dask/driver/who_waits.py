"""Finds out where workers are: which of them waits for which, on which edge, and what those that
hang are doing.

A worker's event loop answers, although its task's thread hangs. Where it does not, the nanny that
has started its process is asked what became of that.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from distributed import Client

from siirl_dask.config import Config
from siirl_dask.errors import Origin, RunError, SilentPeer
from siirl_dask.observe import printable
from siirl_dask.worker.monitoring.task_progress import Reading
from siirl_dask.worker.run_spec import RunSpec
from siirl_dask.worker.tasks import describe_position, describe_process, describe_wait

logger = logging.getLogger("siirl_dask.driver")
_TIMES_STALL = 1.5  # where all workers are silent, cluster.stall_timeout ends the run first
_ANSWER_TIMEOUT = 2.0  # seconds for a worker, and then for its nanny
_TIMEOUT = 10.0  # seconds for all of them
_MAX_ASKED = 64  # workers that are asked: those that hang first
_MAX_STACKS = 8  # workers whose stacks are shown
_MAX_WAITING = 24  # lines about workers that wait
_MAX_PEERS = 4  # workers that a line names, of those that a worker waits for
_MAX_POSITIONS = 8  # workers whose positions an error names
_MAX_LINES = 60  # lines of a worker's stacks
_MAX_CHARACTERS = 200  # characters of a line
# the place of a task, as worker/node_call.py names it
_IN_NODE = re.compile(r"node '([\w-]+)', ([^:]+)")
STOPPED = "stopped"
"""State, as a nanny reports it, of the process of a worker that was stopped by SIGSTOP."""


@dataclass(frozen=True, slots=True)
class WorkerAnswer:
    """A worker's answer, or what is known of one that gives none."""

    answered: bool
    place: str = ""
    waits: bool = False
    awaited: Sequence[tuple[str, str, float]] = ()
    """Worker whose answer it waits for, on which edge, and for how many seconds."""
    stacks: Sequence[str] = ()
    process: str = ""
    """State of its process by the system, where it does not answer and its nanny does."""
    pid: int | None = None


@dataclass(frozen=True, slots=True)
class WaitGraph:
    """Which worker of a run waits for which, by the workers' answers."""

    members: Mapping[str, str]
    answers: Mapping[str, WorkerAnswer]
    hanging: Sequence[str] = field(default=())
    """Workers in whose nodes nothing gets done."""

    @property
    def unanswered(self) -> list[str]:
        """Workers that do not answer."""
        return [worker for worker, answer in self.answers.items() if not answer.answered]

    def text(self) -> str:
        """Return lines for the user: who hangs, with its stacks, and who waits for whom."""
        lines: list[str] = []
        for worker in (*self.unanswered, *self._answering_hanging()[:_MAX_STACKS]):
            lines += self._describe_state(worker)
        waiting = [line for line in map(self._describe_wait, self.answers) if line]
        lines += waiting[:_MAX_WAITING]
        if len(waiting) > _MAX_WAITING:
            lines.append(f"and {len(waiting) - _MAX_WAITING} more that wait")
        return "\n".join(map(printable, lines))

    def _answering_hanging(self) -> list[str]:
        unanswered = self.unanswered
        return [
            worker for worker in self.hanging if worker in self.answers and worker not in unanswered
        ]

    def _describe_state(self, worker: str) -> list[str]:
        answer = self.answers[worker]
        name = f"worker {worker!r} at {self.members[worker]}"
        if answer.answered:
            return [
                f"{name} is in {answer.place or 'no task of the run'}:",
                *(f"  {line}" for line in answer.stacks),
            ]
        if answer.process == STOPPED:
            return [
                f"{name} answers nothing: its process was stopped (SIGSTOP); kill -CONT "
                f"{answer.pid} wakes it"
            ]
        if answer.process:
            return [
                f"{name} answers nothing: its process {answer.pid} is {answer.process}; code may "
                "hold Python's lock"
            ]
        return [
            f"{name} answers nothing: its process was stopped, holds Python's lock, or is cut off"
        ]

    def _describe_wait(self, worker: str) -> str:
        """Return whom a worker waits for; an empty text for one that does not wait."""
        answer = self.answers[worker]
        if not answer.answered:
            return ""
        longest: dict[str, tuple[str, float]] = {}
        for peer, edge, seconds in answer.awaited:
            if peer not in longest or longest[peer][1] < seconds:
                longest[peer] = (edge, seconds)
        if longest:
            peers = [
                f"worker {peer!r} on edge {edge}, for {seconds:.0f} s"
                for peer, (edge, seconds) in longest.items()
            ]
            more = ""
            if len(peers) > _MAX_PEERS:
                more = " and others"
            return f"worker {worker!r} waits for {' and '.join(peers[:_MAX_PEERS])}{more}"
        if answer.waits:
            return (
                f"worker {worker!r} waits in {answer.place or 'a task of the run'} for the others "
                "of its group"
            )
        return ""


def node_timeout(config: Config) -> float:
    """Return the seconds for which one node on one worker may get nothing done; 0: any time."""
    if config.run.node_timeout is None:
        return _TIMES_STALL * config.cluster.stall_timeout
    return config.run.node_timeout


def failure_of_hang(
    client: Client,
    spec: RunSpec,
    silent: Sequence[Any],
    position: str,
) -> RunError:
    """Return the failure of a step in which workers have been silent.

    ``silent`` is the supervisor's report on each: worker, place, seconds, and whether heartbeats
    arrive. It is a SilentPeer, after which the run may be launched again, where the process of the
    first does not answer either.
    """
    (first, place, seconds, _), *others = silent
    graph = _ask_if_reachable(client, spec, [worker for worker, *_ in silent])
    limit = "(run.node_timeout)"
    if graph is None or first in graph.unanswered:
        name = f"worker {first!r} at {spec.members[first]}"
        reason = "its process was stopped, or it is cut off"
        if graph is not None and graph.answers[first].process == STOPPED:
            reason = "its process was stopped (SIGSTOP)"
        failure: RunError = SilentPeer(
            f"{position}: {name}: no heartbeat for {seconds:.0f} s {limit}: {reason}"
        )
        failure.silence = seconds
    else:
        also = [
            f", nor on worker {worker!r} in {at or 'no node'}"
            for worker, at, *_ in others[:_MAX_STACKS]
        ]
        failure = RunError(
            f"{place or position}: nothing got done for {seconds:.0f} s {limit} on worker "
            f"{first!r}{''.join(also)}"
        )
    node = _IN_NODE.match(place)
    if node is None:
        failure.origin = Origin(worker=first)
    else:
        failure.origin = Origin(worker=first, node=node[1], iteration=node[2])
    failure.report = "" if graph is None else graph.text()
    return failure


def describe_waits(client: Client, spec: RunSpec, hanging: Sequence[str]) -> str:
    """Return who waits for whom, for the user; an empty text where the scheduler does not pass
    the question on.
    """
    graph = _ask_if_reachable(client, spec, hanging)
    if graph is None:
        return ""
    return graph.text()


def _ask_if_reachable(client: Client, spec: RunSpec, hanging: Sequence[str]) -> WaitGraph | None:
    """Return the workers' answers; None where the scheduler does not pass the question on."""
    try:
        return who_waits(client, spec, hanging)
    except OSError:
        return None


def who_waits(client: Client, spec: RunSpec, hanging: Sequence[str]) -> WaitGraph:
    """Ask the workers, those that are ``hanging`` first. OSError where the scheduler does not
    pass the question on.
    """
    others = [worker for worker in spec.members if worker not in hanging]
    present = client.scheduler_info(n_workers=-1)["workers"]
    asked = [
        worker for worker in [*hanging, *others][:_MAX_ASKED] if spec.members[worker] in present
    ]
    answers = client.sync(_ask_all, client, spec, asked, callback_timeout=_TIMEOUT)
    return WaitGraph(spec.members, dict(zip(asked, answers, strict=True)), hanging)


async def _ask_all(client: Client, spec: RunSpec, workers: Sequence[str]) -> list[WorkerAnswer]:
    return await asyncio.gather(*(_ask(client, spec, worker) for worker in workers))


async def _ask(client: Client, spec: RunSpec, worker: str) -> WorkerAnswer:
    address = spec.members[worker]
    answer = await _result_of(client.run(describe_wait, spec.plugin, workers=[address]), address)
    if answer is not None:
        return read_answer(answer)
    match await _result_of(client.run(describe_process, workers=[address], nanny=True), address):
        case [str(process), int(pid)]:
            return WorkerAnswer(answered=False, process=process[:40], pid=pid)
    return WorkerAnswer(answered=False)


async def _result_of(call: Awaitable[Any], address: str) -> Any:
    """Return the result of a call to the worker at ``address``, or to its nanny; None where that
    does not answer.
    """
    try:
        return (await asyncio.wait_for(call, _ANSWER_TIMEOUT))[address]
    except Exception:
        # a process that stands still, or is just leaving, may break the connection in any way
        return None


def read_answer(message: object) -> WorkerAnswer:
    """Return an answer that came over the network, cut to bounded size; an empty one where it
    has another form.
    """
    match message:
        case {
            "place": str(place),
            "waits": bool(waits),
            "owed": list(rows),
            "stacks": list(stacks),
        }:
            awaited: list[tuple[str, str, float]] = []
            for row in rows[:_MAX_ASKED]:
                match row:
                    case [str(peer), str(edge), float(seconds)]:
                        awaited.append((peer[:_MAX_CHARACTERS], edge[:_MAX_CHARACTERS], seconds))
            return WorkerAnswer(
                answered=True,
                place=place[:_MAX_CHARACTERS],
                waits=waits,
                awaited=awaited,
                stacks=[
                    line[:_MAX_CHARACTERS] for line in stacks[:_MAX_LINES] if isinstance(line, str)
                ],
            )
    return WorkerAnswer(answered=True)


def describe_positions(busy: Mapping[str, Reading], writing: Sequence[tuple[str, str]]) -> str:
    """Return where the workers in a task are; those that wait for others only where all do.

    ``writing`` has workers that still write their part of a checkpoint, and its URL.
    """
    working = {worker: reading for worker, reading in busy.items() if not reading.waits}
    shown = busy
    if working:
        shown = working
    positions = [
        f"worker {worker!r} is in {reading.place or 'no task of the run'}"
        for worker, reading in shown.items()
    ]
    positions += [f"worker {worker!r} still writes its part of {url}" for worker, url in writing]
    if not positions:
        return "no worker is in a task of the run"
    more = ""
    if len(positions) > _MAX_POSITIONS:
        more = f" and {len(positions) - _MAX_POSITIONS} more"
    waiting = ""
    if len(shown) < len(busy):
        waiting = ", the others wait for it"
    return "; ".join(positions[:_MAX_POSITIONS]) + more + waiting


def warn_of_busy_workers(client: Client, spec: RunSpec, busy: Sequence[str]) -> None:
    """Log where each of the members ``busy`` is: it takes no other task until its own returns."""
    if not busy:
        return
    try:
        present = client.scheduler_info(n_workers=-1)["workers"]
        addresses = [spec.members[worker] for worker in busy if spec.members[worker] in present]
        positions = client.sync(
            _ask_positions, client, spec.plugin, addresses, callback_timeout=_TIMEOUT
        )
    except OSError:
        return  # the scheduler is gone
    for address, position in zip(addresses, positions, strict=True):
        name = str(present[address]["name"])
        advice = "it takes no other task until that returns; restart it if it never does"
        logger.warning("worker %r at %s is still inside %s: %s", name, address, position, advice)


async def _ask_positions(client: Client, plugin: str, addresses: Sequence[str]) -> list[str]:
    async def ask(address: str) -> str:
        position = await _result_of(
            client.run(describe_position, plugin, workers=[address]), address
        )
        if position is None:
            return "a call that keeps it from answering"
        return str(position)

    return await asyncio.gather(*map(ask, addresses))
