"""TransferQueue: sources put rows under keys, destinations get theirs, storage units lie in
between.

``tq_dense`` moves padded tensors, ``tq_jagged`` nested ones of the rows' own lengths. Tuned: one
thread a client (``peers.ray_workers``), two storage units.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import transfer_queue
from omegaconf import OmegaConf
from tensordict import TensorDict

from method import Method
from peers.ray_workers import HolderMethod, RowHolder, get, start_holders, start_ray, stop_ray
from work import COLUMNS, Held, Work, inspect_padded, pad_rows, touch

_STORAGE = {"storage_backend": "SimpleStorage", "SimpleStorage": {"num_data_storage_units": 2}}


def _keys(partition: str, uids: Any) -> list[str]:
    return [f"{partition}_{uid}" for uid in uids]


class _Holder(RowHolder):
    def connect(self) -> None:
        transfer_queue.init()
        if self.rows is not None:
            self.dense = {
                name: torch.from_numpy(v)
                for name, v in pad_rows(self.rows, self.work.tokens).items()
            }

    def put(self, partition: str, jagged: bool) -> None:
        assert self.rows is not None
        uids, offsets = torch.from_numpy(self.rows.uids), torch.from_numpy(self.rows.offsets)
        fields: dict[str, Any] = dict(self.dense)
        if jagged:
            nest = torch.nested.nested_tensor_from_jagged
            fields = {
                name: nest(torch.from_numpy(values), offsets)
                for name, values in self.rows.columns.items()
            }
        batch = TensorDict(fields | {"uid": uids}, batch_size=len(uids))
        transfer_queue.kv_batch_put(
            keys=_keys(partition, self.rows.uids), partition_id=partition, fields=batch
        )

    def fetch(self, partition: str, destination: int) -> None:
        keys = _keys(partition, self.work.uids_of(destination))
        self.received = transfer_queue.kv_batch_get(keys=keys, partition_id=partition)
        touch((v.values() if v.is_nested else v).numpy() for v in self._columns())

    def clear(self, partition: str) -> None:
        transfer_queue.kv_clear(
            keys=_keys(partition, range(self.work.rows)), partition_id=partition
        )

    def check(self) -> Held:
        uids = self.received["uid"].numpy().reshape(-1)
        columns = [[row.numpy() for row in column.unbind()] for column in self._columns()]
        return inspect_padded(uids, columns, self.work.lengths)

    def _columns(self) -> list[Any]:
        return [self.received[name] for name in COLUMNS]


class _Queue(HolderMethod):
    def __init__(self, name: str, work: Work, holders: Sequence[Any], jagged: bool) -> None:
        super().__init__(name, work, holders)
        self._jagged = jagged
        self._round = 0

    def before(self) -> None:
        self._round += 1
        self._partition = f"{self.name}-{self._round}"

    def run(self) -> None:
        get([source.put.remote(self._partition, self._jagged) for source in self.sources])
        get(
            [
                destination.fetch.remote(self._partition, d)
                for d, destination in enumerate(self.destinations)
            ]
        )

    def after(self) -> None:
        super().after()
        get([self.sources[0].clear.remote(self._partition)])


class TransferQueue:
    """One actor per worker serves both variants."""

    def start(self, work: Work) -> Sequence[Method]:
        start_ray(work)
        transfer_queue.init(OmegaConf.create({"backend": _STORAGE}, flags={"allow_objects": True}))
        holders = start_holders(_Holder, work)
        get([holder.connect.remote() for holder in holders])
        return [_Queue("tq_dense", work, holders, False), _Queue("tq_jagged", work, holders, True)]

    def close(self) -> None:
        transfer_queue.close()
        stop_ray()
