"""Ray's object store, used in three ways.

``ray_refs``: every source splits its rows into one object per destination, and each destination is
handed references: the driver sees no row. ``ray_refs_arrow`` is the same with Arrow tables.
``ray_driver``: the driver fetches the rows, regroups and puts them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import ray

from method import Method
from peers.ray_workers import HolderMethod, RowHolder, get, start_holders, stop_ray
from work import COLUMNS, Held, Rows, Work, inspect, offsets_of, touch


class _Holder(RowHolder):
    def whole(self) -> Rows | None:
        return self.rows

    def split(self) -> list[Rows] | Rows:
        assert self.rows is not None
        count = self.work.destinations
        parts = [self.rows.share_of(destination, count) for destination in range(count)]
        return parts if count > 1 else parts[0]

    def join(self, *parts: Rows) -> None:
        self.received = parts
        touch(array for part in parts for array in part.arrays)

    def make_table(self) -> None:
        if self.rows is not None:
            self.table = _to_table(self.rows)

    def split_table(self) -> list[pa.Table] | pa.Table:
        uids, count = self.table["uid"].to_numpy(), self.work.destinations
        parts = [self.table.take(pa.array(np.flatnonzero(uids % count == d))) for d in range(count)]
        return parts if count > 1 else parts[0]

    def join_tables(self, *parts: pa.Table) -> None:
        self.received = [_of_table(table) for table in parts]
        touch(array for part in self.received for array in part.arrays)

    def check(self) -> Held:
        return sum((inspect(part) for part in self.received), Held((), ()))


def _to_table(rows: Rows) -> pa.Table:
    offsets = pa.array(rows.offsets)
    lists = {
        name: pa.LargeListArray.from_arrays(offsets, pa.array(column))
        for name, column in rows.columns.items()
    }
    return pa.table({"uid": pa.array(rows.uids)} | lists)


def _of_table(table: pa.Table) -> Rows:
    """Views of the table, whose columns are of one chunk each."""
    lists = {name: table[name].chunk(0) for name in COLUMNS}
    lengths = np.diff(lists["ids"].offsets.to_numpy())
    columns = {name: values.flatten().to_numpy() for name, values in lists.items()}
    return Rows(table["uid"].to_numpy(), offsets_of(lengths), columns)


class _References(HolderMethod):
    def __init__(
        self, name: str, work: Work, holders: Sequence[Any], split: str, join: str
    ) -> None:
        super().__init__(name, work, holders)
        self._split = split
        self._join = join

    def run(self) -> None:
        count = self.work.destinations
        parts = [
            getattr(source, self._split).options(num_returns=count).remote()
            for source in self.sources
        ]
        parts = parts if count > 1 else [[part] for part in parts]
        joins = [getattr(destination, self._join) for destination in self.destinations]
        get([join.remote(*(part[index] for part in parts)) for index, join in enumerate(joins)])


class _ThroughDriver(HolderMethod):
    def run(self) -> None:
        count = self.work.destinations
        blocks: list[Rows] = get([source.whole.remote() for source in self.sources])
        lengths = np.concatenate([np.diff(block.offsets) for block in blocks])
        columns = {
            name: np.concatenate([block.columns[name] for block in blocks]) for name in COLUMNS
        }
        rows = Rows(np.concatenate([block.uids for block in blocks]), offsets_of(lengths), columns)
        shares = [rows.share_of(destination, count) for destination in range(count)]
        pairs = zip(self.destinations, shares, strict=True)
        get([destination.join.remote(ray.put(share)) for destination, share in pairs])

    def driver_bytes(self) -> int:
        return 2 * self.work.payload_bytes


class RayRefs:
    """One actor per worker serves all three. ``address`` is that of a Ray that is there."""

    def __init__(self, address: str = "") -> None:
        self._address = address

    def start(self, work: Work) -> Sequence[Method]:
        holders = start_holders(_Holder, work, self._address)
        get([holder.make_table.remote() for holder in holders])
        return [
            _References("ray_refs", work, holders, "split", "join"),
            _References("ray_refs_arrow", work, holders, "split_table", "join_tables"),
            _ThroughDriver("ray_driver", work, holders),
        ]

    def close(self) -> None:
        stop_ray()
