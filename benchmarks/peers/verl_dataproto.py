"""verl's DataProto through the driver, as its ray_trainer moves a batch between worker groups.

The driver collects and concatenates (``collect_dp_compute_data_proto``), reorders
(``_balance_batch``), chunks and puts (``dispatch_nd_compute``). ``verl`` uses the default
serialisation of DataProto, ``verl_numpy`` the one that an environment variable selects. Rows are
padded to one length, as DataProto wants them.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
from verl import DataProto
from verl.utils.ray_utils import parallel_put

from method import Method
from peers.ray_workers import HolderMethod, RowHolder, get, start_holders, stop_ray
from work import COLUMNS, Held, Work, inspect_padded, pad_rows, touch

_SERIALIZATION = "VERL_DATAPROTO_SERIALIZATION_METHOD"


def _use_serialization(name: str) -> None:
    """Both ends must agree; the default is the variable's absence."""
    os.environ.pop(_SERIALIZATION, None)
    if name:
        os.environ[_SERIALIZATION] = name


class _Holder(RowHolder):
    proto: DataProto

    def make_proto(self) -> None:
        if self.rows is not None:
            padded = pad_rows(self.rows, self.work.tokens)
            tensors = {name: torch.from_numpy(column) for name, column in padded.items()}
            self.proto = DataProto.from_dict(
                tensors={"uid": torch.from_numpy(self.rows.uids)} | tensors
            )
            self.rows = None

    def use_serialization(self, name: str) -> None:
        _use_serialization(name)

    def give(self) -> DataProto:
        return self.proto

    def take(self, proto: DataProto) -> None:
        self.received = proto
        touch(self._columns())

    def check(self) -> Held:
        return inspect_padded(
            self.received.batch["uid"].numpy(), self._columns(), self.work.lengths
        )

    def _columns(self) -> list[Any]:
        return [self.received.batch[name].numpy() for name in COLUMNS]


class _Proto(HolderMethod):
    def __init__(self, name: str, work: Work, holders: Sequence[Any], serialization: str) -> None:
        super().__init__(name, work, holders)
        self._serialization = serialization

    def before(self) -> None:
        _use_serialization(self._serialization)
        get([holder.use_serialization.remote(self._serialization) for holder in self.holders])

    def run(self) -> None:
        count = self.work.destinations
        proto = DataProto.concat(get([source.give.remote() for source in self.sources]))
        uids = proto.batch["uid"]
        proto.reorder(torch.cat([torch.nonzero(uids % count == d).flatten() for d in range(count)]))
        references = parallel_put(proto.chunk(count), max_workers=min(count, os.cpu_count() or 1))
        pairs = zip(self.destinations, references, strict=True)
        get([destination.take.remote(reference) for destination, reference in pairs])

    def driver_bytes(self) -> int:
        return 2 * 4 * self.work.rows * self.work.tokens * len(COLUMNS)  # padded, in and out


class VerlDataProto:
    """One actor per worker serves both serialisations."""

    def start(self, work: Work) -> Sequence[Method]:
        holders = start_holders(_Holder, work)
        get([holder.make_proto.remote() for holder in holders])
        return [_Proto("verl", work, holders, ""), _Proto("verl_numpy", work, holders, "numpy")]

    def close(self) -> None:
        stop_ray()
