"""A run with a trap at each boundary between two links, and a cluster whose every process can be killed or stopped.

    python -m tests.e2e.traps CONFIG key=value ...

is ``siirl-dask run`` with one more role, whose object is asked at each boundary: when its role is built and closed,
when its state is saved, and by a node after each node of the DAG. It sends the signal that a file orders.
"""

import json
import os
import signal
import time
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path

from siirl_dask import DAG, Node, Role, columns, grpo

START, FINISH, SAVE = "start", "finish", "save"
NODES = ("prompts", "rollout", "reward", "old_logprobs", "advantage", "minibatches", "update")
"""Nodes with a trap after them. Weights go from node to node as a stream, which a node between would end."""
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
        file.with_suffix(".new").write_text(json.dumps(asdict(self)))
        file.with_suffix(".new").rename(file)


class Trap:
    """Role object of one worker. The first worker carries out the order."""

    def __init__(self, rank, file):
        self._rank, self._file, self._step = rank, Path(file), 0
        self.spring(START)

    def spring(self, place, step=None):
        self._step = self._step if step is None else step
        if self._rank or not self._file.exists():
            return
        order = Order(**json.loads(self._file.read_text()))
        if (order.place, order.step) != (place, self._step):
            return
        self._file.rename(self._file.with_suffix(".sprung"))
        self._file.with_suffix(".at").write_text(str(time.time()))
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


def with_traps(dag: DAG, file: str) -> DAG:
    """Return the DAG with a node of the role ``trap`` after each of NODES."""
    children = {name: [node.name for node in dag.nodes if name in node.after] for name in NODES}
    dag = dag.add(
        *(Node(f"after_{name}", asked, role="trap", after=name, options={"place": name}) for name in NODES),
        roles=(Role("trap", partial(build_trap, file=file)),),
    )
    for name, after in children.items():
        for child in after:
            dag = dag.replace(child, after=tuple(f"after_{p}" if p == name else p for p in dag.node(child).after))
    return dag


def _work(address, name):
    import asyncio

    from distributed import Worker

    async def serve():
        async with Worker(address, name=name, nthreads=1, memory_limit=0, dashboard=False, host="127.0.0.1") as worker:
            await worker.finished()

    os.setsid()
    asyncio.run(serve())


def start_workers(address, count, first=0):
    """Processes forked from one that has imported everything, each a worker; the names are numbers from ``first``."""
    from siirl_dask.worker.fork_server import START_METHOD, prepare_processes

    prepare_processes()
    context = get_context(START_METHOD)
    names = range(first, first + count)
    processes = [context.Process(target=_work, args=(address, str(name)), daemon=True) for name in names]
    for process in processes:
        process.start()
    return processes


if __name__ == "__main__":
    import faulthandler

    from siirl_dask import main

    faulthandler.register(signal.SIGUSR1)
    main(lambda config: with_traps(grpo(config), os.environ[FILE]))
