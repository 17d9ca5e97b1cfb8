"""Collects the workers' reports of their parts of checkpoints, until each checkpoint is written."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from siirl_storage import FileDigest

from siirl_dask.driver.iterations import WrittenCheckpoint
from siirl_dask.planner import Iteration


@dataclass(slots=True)
class PendingCheckpoint:
    """A checkpoint that is being written, and the workers that have written their part."""

    iteration: Iteration
    url: str
    saved: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    written: dict[str, dict[str, FileDigest]] = field(default_factory=dict)

    def is_whole(self, workers: Collection[str]) -> bool:
        """Return whether all workers have written their part, and have said what it is: a part may
        be written before the task ends that says so.
        """
        return all(worker in self.saved and worker in self.written for worker in workers)


class PendingCheckpoints:
    """The checkpoints that are being written. ``workers`` are all workers, in rank order."""

    def __init__(self, workers: Collection[str]) -> None:
        self._workers = workers
        # by the sequence number of their iteration
        self._checkpoints: dict[int, PendingCheckpoint] = {}

    def __len__(self) -> int:
        return len(self._checkpoints)

    def begin(self, iteration: Iteration, url: str) -> None:
        """Expect the reports on the checkpoint of an iteration."""
        self._checkpoints[iteration.sequence] = PendingCheckpoint(iteration, url)

    def add_saved(self, event: Mapping[str, Any]) -> None:
        """Add a worker's report of what its part is."""
        self._checkpoints[event["sequence"]].saved[event["member"]] = event["saved"]

    def add_written(self, event: Mapping[str, Any]) -> None:
        """Add a worker's report of the files that it has written."""
        files = {}
        for name, (nbytes, digits) in event["files"].items():
            files[name] = FileDigest(nbytes, digits)
        self._checkpoints[event["sequence"]].written[event["member"]] = files

    def pop(self, first_unfinished: int | None) -> WrittenCheckpoint | None:
        """Return a written checkpoint, once; None if there is none of an iteration up to
        ``first_unfinished``, the sequence number of the first that is not done.
        """
        for sequence, checkpoint in self._checkpoints.items():
            if first_unfinished is not None and sequence > first_unfinished:
                continue
            if not checkpoint.is_whole(self._workers):
                continue
            del self._checkpoints[sequence]
            saved = [checkpoint.saved[worker] for worker in self._workers]
            files: dict[str, FileDigest] = {}
            for digests in checkpoint.written.values():
                files.update(digests)
            return WrittenCheckpoint(checkpoint.iteration, checkpoint.url, saved, files)
        return None

    def unwritten(self) -> Iterator[tuple[str, str]]:
        """Yield each worker whose part is not written, and the checkpoint's URL."""
        for checkpoint in self._checkpoints.values():
            for worker in self._workers:
                if worker not in checkpoint.written:
                    yield worker, checkpoint.url
