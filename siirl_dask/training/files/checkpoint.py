"""What a role holds, in and out of any store, with torch.distributed.checkpoint: every rank writes its own part.

A folder is what DCP makes of it: ``.metadata``, and a ``.distcp`` file a rank. It loads on another number of ranks.
What is read is not trusted. DCP's metadata is a pickle, and so is whatever is no tensor: the readers here take DCP's
own descriptions and plain values from them, and nothing else.
"""

from __future__ import annotations

import pickle
import warnings
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from fsspec.implementations.local import LocalFileSystem
from siirl_storage import open_fs
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict_loader import load as load_state
from torch.distributed.checkpoint.state_dict_saver import async_save, save

from siirl_dask.errors import CheckpointError

_MODEL, _OPTIMIZER, _EMA = "model.", "optimizer.", ".ema"  # what a state calls parameters, and averages of theirs
_KNOWN = {
    (kind.__module__, kind.__qualname__): kind
    for kind in (
        metadata.Metadata,
        metadata.TensorStorageMetadata,
        metadata.BytesStorageMetadata,
        metadata.ChunkStorageMetadata,
        metadata.TensorProperties,
        metadata._MEM_FORMAT_ENCODING,
        metadata.StorageMeta,
        metadata.MetadataIndex,
        filesystem._StorageInfo,
        torch.Size,
    )
} | {("torch.serialization", "_get_layout"): torch.serialization._get_layout}
"""All that DCP's metadata is made of, besides types of numbers."""
warnings.filterwarnings("ignore", "torch.distributed is disabled", module="torch.distributed.checkpoint")  # on purpose


@dataclass(frozen=True, slots=True)
class DistributedCheckpoint:
    """Saves and loads states: nested mappings of tensors, DTensors and plain values."""

    asynchronous: bool = True
    """Write while training goes on, from a copy of the state in the CPU's memory."""

    def save(self, url: str, state: dict[str, Any], group: ProcessGroup | None) -> Future[None]:
        """Begin to write ``state`` below ``url``, where nothing may be yet; the future is done when all ranks' parts
        are there, or holds a CheckpointError.

        All ranks of ``group`` must call it. It must be a gloo group that nothing else uses meanwhile; None, one
        process. The state may change as soon as this returns.
        """
        local = isinstance(open_fs(url)[0], LocalFileSystem)
        writer = FsspecWriter(
            url, sync_files=local, overwrite=False
        )  # elsewhere a sync would be of this machine's disks
        done: Future[None] = Future()
        how: dict[str, Any] = {"storage_writer": writer, "process_group": group, "no_dist": group is None}
        try:
            if self.asynchronous:
                writing = async_save(state, **how)
                assert isinstance(writing, Future)  # this writer makes the copy before it returns
                writing.add_done_callback(partial(_pass_on, done, url))
            else:
                save(state, **how)
                done.set_result(None)
        except (CheckpointException, Exception) as error:
            done.set_exception(_explained(f"{url} could not be written", error))
        return done

    def load(self, url: str, state: dict[str, Any], group: ProcessGroup | None) -> None:
        """Fill ``state``, which has the names, shapes and placements that are wanted, from below ``url``.

        All ranks of ``group`` must call it; as many as there are now, not as wrote it. CheckpointError.
        """
        _load(url, state, process_group=group, no_dist=group is None)


def read_model(url: str, *, ema: bool = False) -> dict[str, Tensor]:
    """Every parameter of the role that was saved at ``url``, whole, on the CPU, float32, by its Hugging Face name; with
    ``ema`` its moving average.

    Needs no process group. CheckpointError when there is no checkpoint, or none with a model, or with averages.
    """
    try:
        entries = _Reader(url).read_metadata().state_dict_metadata
    except FileNotFoundError as error:
        raise CheckpointError(f"{url} holds no checkpoint: expected a file .metadata there") from error
    before, after = (_OPTIMIZER, _EMA) if ema else (_MODEL, "")
    state = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in entries.items()
        if name.startswith(before) and name.endswith(after) and isinstance(entry, metadata.TensorStorageMetadata)
    }
    if not state:
        what = "moving average of the weights" if ema else "model"
        raise CheckpointError(f"{url} holds no {what}: there is {sorted(entries)[:5]}")
    _load(url, state, no_dist=True)
    return {name.removeprefix(before).removesuffix(after): tensor.float() for name, tensor in state.items()}


def _load(url: str, state: dict[str, Any], **how: Any) -> None:
    try:
        load_state(state, storage_reader=_Reader(url), planner=_Planner(), **how)
    except (CheckpointException, Exception) as error:
        raise _explained(f"{url} could not be read", error) from error


class _Reader(FsspecReader):
    def read_metadata(self, *args: Any, **kwargs: Any) -> metadata.Metadata:
        """As the base's, which unpickles whatever is there."""
        path = self._get_metadata_path(kwargs.get("rank"))
        with self.fs.create_stream(path, "rb") as file:
            try:
                found = _MetadataUnpickler(file).load()
                names = {info.relative_path for info in found.storage_data.values()}
            except Exception as error:  # a damaged pickle raises anything
                raise CheckpointError(f"{path} is not a checkpoint's metadata: {error}") from error
        if outside := [name for name in names if "/" in name or "\\" in name]:
            raise CheckpointError(f"{path} names files that are not beside it: {outside[0]!r}")
        found.storage_meta = metadata.StorageMeta(load_id=self.load_id)
        return found  # type: ignore[no-any-return]


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _KNOWN:
            return _KNOWN[module, name]
        if module == "torch" and isinstance(kind := getattr(torch, name, None), torch.dtype):
            return kind
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which describes no checkpoint")


class _Planner(DefaultLoadPlanner):
    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        """As the base's, which unpickles whatever is there."""
        place = self.mappings[read_item.dest_index.fqn]
        set_element(self.original_state_dict, place, torch.load(value, weights_only=True))


def _pass_on(done: Future[None], url: str, written: Future[Any]) -> None:
    if (error := written.exception()) is None:
        done.set_result(None)
    else:
        done.set_exception(_explained(f"{url} could not be written", error))


def _explained(what: str, error: BaseException) -> CheckpointError:
    """DCP's own exception holds one of each rank, and is no Exception: it would take a worker down."""
    if isinstance(error, CheckpointException):
        rank, (error, _) = min(error.failures.items())
        what = f"{what} (rank {rank})"
    failure = CheckpointError(f"{what}: {type(error).__name__}: {error}")
    failure.__cause__ = error
    return failure
