"""A run with a trap at each boundary between two links, and a cluster whose every process can be
killed or stopped.

    python -m tests.e2e.traps CONFIG key=value ...

is ``siirl-dask run`` with one more role, whose object is asked at each boundary: when its role is
built and closed, when its state is saved, and by a node after each node of the DAG. It sends the
signal that a file orders, and notes when that place is reached again. What engines are asked to
sample is noted as well, outside of the processes.
"""

import json
import os
import signal
import sys
import time
from dataclasses import asdict, dataclass, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path

from siirl_dask import DAG, Node, Role, columns, grpo

START, FINISH, SAVE = "start", "finish", "save"
NODES = ("prompts", "rollout", "reward", "old_logprobs", "advantage", "minibatches", "update")
"""Nodes with a trap after them. Weights go from node to node as a stream, which a node between
would end."""
PLACES = (START, *NODES, SAVE, FINISH)
FILE = "TRAP"  # environment variable of the driver: where orders are found


@dataclass(frozen=True)
class Order:
    """Send ``sign`` to the processes ``pids``, and to the worker that is there, if ``itself``."""

    place: str
    step: int
    sign: int
    pids: tuple[int, ...] = ()
    itself: bool = False

    def give(self, file: Path) -> None:
        write(file, json.dumps(asdict(self)))


def write(file: Path, text: str) -> None:
    """Write a file that others look for: it is there with all its text."""
    file.with_suffix(".new").write_text(text)
    file.with_suffix(".new").rename(file)


class Trap:
    """Role object of one worker. The first worker carries out the order."""

    def __init__(self, rank, file):
        self._rank, self._file, self._step = rank, Path(file), 0
        self.spring(START)

    def spring(self, place, step=None):
        self._step = self._step if step is None else step
        sprung, again = self._file.with_suffix(".sprung"), self._file.with_suffix(".again")
        if self._rank or again.exists() or not (self._file.exists() or sprung.exists()):
            return
        order = Order(**json.loads((sprung if sprung.exists() else self._file).read_text()))
        if (order.place, order.step) != (place, self._step):
            return
        if sprung.exists():
            write(again, str(time.time()))
            return
        self._file.rename(sprung)
        write(self._file.with_suffix(".at"), str(time.time()))
        for pid in (*order.pids, *([os.getpid()] if order.itself else [])):
            os.kill(pid, order.sign)

    def state(self):
        if self._step:
            self.spring(SAVE)
        return {"step": self._step}

    def load_state(self, state):
        self._step = state["step"]

    def close(self):
        self._file.with_suffix(f".closed-{self._rank}").touch()
        self.spring(FINISH)


def build_trap(device, rank, *, file):
    return Trap(rank.rank, file)


@columns()
def asked(ctx, table, *, place):
    ctx.resource.spring(place, ctx.step)
    return table


class Counted:
    """A RequestQueue that notes, in a file, when an engine takes a request, and its seed: each
    row has its own.
    """

    def __init__(self, queue, file):
        self._queue, self._file = queue, file

    def next(self, limit, *, wait):
        requests = self._queue.next(limit, wait=wait)
        with Path(self._file).open("a") as file:
            file.write("".join(f"{time.time()} {request.seed}\n" for _, request in requests))
        return requests

    def complete(self, ticket, result):
        self._queue.complete(ticket, result)


def build_counted(device, rank, *, inner, file, options):
    """Build an engine whose requests are noted."""
    engine = inner(device, rank, **options)
    serve = engine.serve
    engine.serve = lambda queue: serve(Counted(queue, file))
    return engine


def counted(dag: DAG, file: str) -> DAG:
    """Return the DAG with an engine that notes its requests."""

    def noted(role):
        build = partial(
            build_counted, inner=role.build.func, file=file, options=role.build.keywords
        )
        return replace(role, build=build) if role.name == "rollout" else role

    return replace(dag, roles=tuple(map(noted, dag.roles)))


def with_traps(dag: DAG, file: str) -> DAG:
    """Return the DAG with a node of the role ``trap`` after each of NODES."""
    children = {name: [node.name for node in dag.nodes if name in node.after] for name in NODES}
    dag = dag.add(
        *(
            Node(f"after_{name}", asked, role="trap", after=name, options={"place": name})
            for name in NODES
        ),
        roles=(Role("trap", partial(build_trap, file=file)),),
    )
    for name, after in children.items():
        for child in after:
            dag = dag.replace(
                child, after=tuple(f"after_{p}" if p == name else p for p in dag.node(child).after)
            )
    return dag


def _work(address, name):
    from distributed import Worker

    async def serve():
        async with Worker(
            address, name=name, nthreads=1, memory_limit=0, dashboard=False, host="127.0.0.1"
        ) as worker:
            await worker.finished()

    _be_alone(serve)


def _schedule(port):
    from distributed import Scheduler

    async def serve():
        async with Scheduler(host="127.0.0.1", port=port, dashboard=False) as scheduler:
            await scheduler.finished()

    _be_alone(serve)


def _be_alone(serve):
    import asyncio
    import logging

    logging.getLogger("distributed").setLevel(logging.CRITICAL)
    os.setsid()
    asyncio.run(serve())


def start_scheduler(port):
    """Start a process, forked from one that has imported everything, that is a scheduler at ``tcp://127.0.0.1:port``."""
    return _start(_schedule, port)


def start_workers(address, count, first=0):
    """Processes forked from one that has imported everything, each a worker; the names are
    numbers from ``first``.
    """
    return [_start(_work, address, str(name)) for name in range(first, first + count)]


def _start(target, *arguments):
    from siirl_dask.worker.process.fork_server import START_METHOD, prepare_processes

    prepare_processes()
    process = get_context(START_METHOD).Process(target=target, args=arguments, daemon=True)
    process.start()
    return process


def _drive(file, said, arguments):
    os.setsid()
    with Path(said).open("a") as output:
        for stream in (sys.stdout, sys.stderr):
            os.dup2(output.fileno(), stream.fileno())
            stream.reconfigure(line_buffering=True)
    run(file, arguments)


def start_driver(file, said, arguments):
    """Start a process, forked as workers are, that is the command of this module and appends
    what it says to a file.
    """
    return _start(_drive, file, said, arguments)


def run(file, arguments=None):
    """Train as the command line says, with the traps and the count of ``file``."""
    from siirl_dask import main

    main(
        lambda config: counted(with_traps(grpo(config), file), f"{file}.calls"), arguments=arguments
    )


if __name__ == "__main__":
    import faulthandler

    faulthandler.register(signal.SIGUSR1)
    run(os.environ[FILE])
