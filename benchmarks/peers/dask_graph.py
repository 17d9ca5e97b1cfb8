"""Dask as one uses it every day: a graph of futures, pinned to workers, that split and join."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from distributed import Future

from dask_cluster import DaskCluster, wait_for
from work import Held, Rows, Work, inspect, make_rows, touch


def _split(rows: Rows, destination: int, work: Work) -> Rows:
    return rows.share_of(destination, work.destinations)


def _join(*parts: Rows) -> list[Rows]:
    touch(array for part in parts for array in part.arrays)
    return list(parts)


def _check(parts: list[Rows]) -> Held:
    return sum((inspect(part) for part in parts), Held((), ()))


class DaskGraph:
    """The rows of each source are a future on its worker."""

    name = "dask_graph"

    def __init__(self, work: Work, cluster: DaskCluster) -> None:
        self._work = work
        self._cluster = cluster
        sources = enumerate(cluster.addresses[: work.sources])
        self._rows = [self._submit(address, make_rows, work, source) for source, address in sources]
        wait_for(self._rows)
        self._joined: Sequence[Future[Any]] = ()

    def before(self) -> None:
        self._bytes_before = self._cluster.traffic()

    def run(self) -> None:
        work = self._work
        self._joined = [
            self._submit(
                target,
                _join,
                *(
                    self._submit(address, _split, rows, destination, work)
                    for address, rows in self._sources()
                ),
            )
            for destination, target in enumerate(self._cluster.addresses[work.targets])
        ]
        wait_for(self._joined)

    def check(self) -> list[Held]:
        held: list[Held] = self._cluster.client.gather(
            [self._cluster.client.submit(_check, f) for f in self._joined]
        )
        return held

    def driver_bytes(self) -> int:
        return self._cluster.traffic() - self._bytes_before

    def after(self) -> None:
        self._joined = ()

    def _sources(self) -> list[tuple[str, Future[Any]]]:
        return list(zip(self._cluster.addresses, self._rows, strict=False))

    def _submit(self, address: str, function: Any, *arguments: Any) -> Future[Any]:
        return self._cluster.client.submit(function, *arguments, workers=[address], pure=False)
