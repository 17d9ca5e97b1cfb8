"""Frees SGLang's memory on an accelerator while others compute there: its cache, and weights
that others replace.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from siirl_dask.errors import RunError

CACHE = "kv_cache"
WEIGHTS = "weights"
"""SGLang's names of what can be freed."""


class SglangSleep:
    """Knows what of an engine is asleep: SGLang fails when it is asked twice for the same."""

    def __init__(self, engine: Any, make_room: Callable[[], None], *, able: bool) -> None:
        """``make_room`` frees what torch's allocator in this process keeps for later; not
        ``able``: nothing sleeps.
        """
        self._engine = engine
        self._make_room = make_room
        self._able = able
        self._asleep = frozenset[str]()

    @property
    def cache_is_gone(self) -> bool:
        """Whether the cache sleeps: SGLang has forgotten what was in it."""
        return CACHE in self._asleep

    def begin(self, *, weights_follow: bool) -> None:
        """Free the cache; the weights too if others follow, since SGLang keeps no copy of them."""
        if not self._able:
            return
        wanted = {CACHE, WEIGHTS} if weights_follow else {CACHE}
        if tags := sorted(wanted - self._asleep):
            self._engine.release_memory_occupation(tags=tags)
            self._asleep |= wanted

    def wake_weights(self) -> None:
        """Take memory for the weights, which are about to be loaded; the cache sleeps on."""
        self._wake({WEIGHTS})

    def end(self) -> None:
        """Wake up, to generate. RunError when the weights are gone and no new ones came."""
        if WEIGHTS in self._asleep:
            raise RunError(
                "SGLang let go of its weights since a node was to load others before anything is "
                "generated, and something was asked of it before: use an engine in nodes of its "
                "own role alone, or give rollout.sglang.sleep=false"
            )
        self._wake({CACHE})

    def _wake(self, wanted: set[str]) -> None:
        if tags := sorted(wanted & self._asleep):
            self._make_room()
            self._engine.resume_memory_occupation(tags=tags)
            self._asleep -= wanted
