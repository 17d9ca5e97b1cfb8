"""Slots: what a worker has published, by key, for peers that may ask for it before it is there."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from siirl_dask.coordinator.databuffer.published import Published
from siirl_dask.coordinator.transport.messages import TransitionKey
from siirl_dask.errors import Aborted


class PublishedSlots:
    """One slot a key, made for whoever is first, the publisher or a peer that waits for it."""

    def __init__(self) -> None:
        self._slots: dict[TransitionKey, asyncio.Future[Published]] = {}
        self.aborted: str | None = None

    def slot(self, key: TransitionKey) -> asyncio.Future[Published]:
        """Return the slot of a key, made if it is not there yet."""
        if key not in self._slots:
            self._slots[key] = asyncio.get_running_loop().create_future()
            if self.aborted is not None:
                self._fail(self._slots[key])
        return self._slots[key]

    async def wait(self, key: TransitionKey) -> Published:
        """Wait until something is published under a key, and return it."""
        return await asyncio.shield(self.slot(key))  # one that gives up waiting must not cancel the slot

    def find(self, key: TransitionKey) -> Published | None:
        """Return what is published under a key; None before that, and after an abort."""
        if key not in self._slots:
            return None
        return _result(self._slots[key])

    def all_published(self) -> Iterator[Published]:
        """Yield everything that is published and not forgotten."""
        for slot in self._slots.values():
            published = _result(slot)
            if published is not None:
                yield published

    def forget(self, before: int) -> None:
        """Drop the slots of iterations before sequence number ``before``, but for tables that peers still read."""
        for key in [key for key in self._slots if key.sequence < before]:
            published = _result(self._slots[key])
            if published is None or not published.is_shared:
                self._slots.pop(key).cancel()

    def abort(self, reason: str) -> None:
        """Wake every wait, now and later, with Aborted."""
        self.aborted = reason
        for slot in self._slots.values():
            self._fail(slot)
        for published in self.all_published():
            published.all_acked.set()

    def clear(self) -> None:
        """Drop all slots."""
        self._slots.clear()

    def _fail(self, slot: asyncio.Future[Published]) -> None:
        if not slot.done():
            slot.set_exception(Aborted(self.aborted or ""))
            slot.exception()  # marks it as seen: not every slot has someone waiting


def _result(slot: asyncio.Future[Published]) -> Published | None:
    """Return what a slot holds; None before anything is published, and after an abort."""
    if not slot.done() or slot.cancelled() or slot.exception() is not None:
        return None
    return slot.result()
