"""Dask's own P2P shuffle of a dataframe.

It cannot carry lists, so a row's columns travel as binary. It chooses the workers of its output by
itself, hashes the key to choose a partition, keeps no order, and is not asked to touch what
arrived.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import dask.dataframe as dd
import numpy as np
import pandas as pd
import pyarrow as pa
from dask.dataframe.shuffle import partitioning_index
from distributed import futures_of
from numpy.typing import NDArray

from dask_cluster import DaskCluster, wait_for
from work import COLUMNS, Held, Ints, Work, inspect_row, make_rows

_KEY = "key"
Floats = NDArray[np.float64]


def _keys_of_their_own(partitions: int) -> Floats:
    """Return, for each partition, the first number that hashes to it."""
    numbers = np.arange(100.0 * partitions)  # floats: the shuffle hashes numbers as such
    places: Ints = partitioning_index(pd.DataFrame({_KEY: numbers}), partitions)
    found, first = np.unique(places, return_index=True)
    assert len(found) == partitions
    return numbers[first]


def _make_frame(work: Work, source: int, keys: Floats) -> pd.DataFrame:
    rows = make_rows(work, source)
    spans = [
        slice(start, stop) for start, stop in zip(rows.offsets[:-1], rows.offsets[1:], strict=True)
    ]
    binary = {
        n: pa.array([v[s].tobytes() for s in spans], pa.large_binary())
        for n, v in rows.columns.items()
    }
    frame = pa.table({"uid": pa.array(rows.uids)} | binary).to_pandas(types_mapper=pd.ArrowDtype)
    return frame.assign(uid=rows.uids, **{_KEY: keys[rows.uids % work.destinations]})


def _empty(frame: pd.DataFrame) -> pd.DataFrame:
    return frame.iloc[:0]


def _check(frame: pd.DataFrame) -> Held:
    columns = [
        [np.frombuffer(cell, kind) for cell in frame[name]] for name, kind in COLUMNS.items()
    ]
    return Held(
        tuple(int(uid) for uid in frame["uid"]),
        tuple(inspect_row(row) for row in zip(*columns, strict=True)),
    )


class DaskP2P:
    """The rows of each source are a partition on its worker."""

    name = "dask_p2p"

    def __init__(self, work: Work, cluster: DaskCluster) -> None:
        self._work = work
        self._cluster = cluster
        client, keys = cluster.client, _keys_of_their_own(work.destinations)
        sources = enumerate(cluster.addresses[: work.sources])
        frames = [
            client.submit(_make_frame, work, s, keys, workers=[a], pure=False) for s, a in sources
        ]
        wait_for(frames)
        meta = client.submit(_empty, frames[0]).result()
        self._frame = dd.from_delayed(frames, meta=meta, verify_meta=False)
        self._shuffled: Any = None

    def before(self) -> None:
        self._bytes_before = self._cluster.traffic()

    def run(self) -> None:
        shuffled = self._frame.shuffle(
            on=_KEY, npartitions=self._work.destinations, shuffle_method="p2p"
        )
        self._shuffled = shuffled.persist()
        wait_for(futures_of(self._shuffled))

    def check(self) -> list[Held]:
        client, parts = self._cluster.client, futures_of(self._shuffled)
        held: Sequence[Held] = client.gather([client.submit(_check, part) for part in parts])
        return list(held)

    def driver_bytes(self) -> int:
        return self._cluster.traffic() - self._bytes_before

    def after(self) -> None:
        self._shuffled = None
