"""Work that the workers of a role take over from one another, as a node asks for it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from siirl_dask.coordinator.messages import TransitionKey, Turn
from siirl_dask.coordinator.stealing import Codec, LoopCalls, Pile, SharedWork, Stealing
from siirl_dask.planner import Node
from siirl_dask.worker.stop import StopFlag, finished


@dataclass(slots=True)
class Sharing:
    """Of one worker. ``placement`` are the workers of each role."""

    worker: str
    placement: Mapping[str, Sequence[str]]
    stealing: Stealing
    loop: asyncio.AbstractEventLoop
    stop: StopFlag
    _latest: tuple[int, str] = (-1, "")
    _times: int = 0

    def __call__(self, turn: Turn, node: Node, items: Sequence[Any], codec: Codec[Any, Any]) -> SharedWork[Any, Any]:
        """Items of ``node`` in ``turn``, which all workers of its role share. For the thread that runs the node, which
        may ask several times in a turn, as often as its peers.
        """
        self._times = self._times + 1 if self._latest == (turn.sequence, node.name) else 0
        self._latest = (turn.sequence, node.name)
        workers = list(self.placement[node.role])
        at = workers.index(self.worker)
        key = TransitionKey(self.stealing.run, turn.sequence, f"{turn.phase}/{node.name}/{self._times}")
        calls = LoopCalls(
            partial(asyncio.run_coroutine_threadsafe, loop=self.loop),
            partial(finished, stop=self.stop),
            self.stop.check,
        )
        return SharedWork(Pile(items, codec), key, workers[at + 1 :] + workers[:at], self.stealing, calls)
