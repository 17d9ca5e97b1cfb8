"""Saves and loads a role's state on any store with torch.distributed.checkpoint (DCP); each rank
writes its own part.

A checkpoint is a DCP folder: ``.metadata`` and one ``.distcp`` file per rank. It loads on any
number of ranks. Files are not trusted: DCP pickles its metadata and all values that are no tensors,
and the readers here unpickle only DCP's own classes and plain values.
"""

from __future__ import annotations

import os
import pickle
import warnings
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from functools import partial
from pathlib import Path
from typing import IO, Any, cast

import torch
from fsspec.implementations.local import LocalFileSystem
from siirl_storage import FileDigest, full_disk_named, is_full, open_fs, retry
from siirl_storage.digests import DigestingStream
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint._fsspec_filesystem import FileSystem, FsspecReader, FsspecWriter
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem
from torch.distributed.checkpoint.state_dict_loader import load as load_state
from torch.distributed.checkpoint.state_dict_saver import async_save, save

from siirl_dask.devices.accelerator import binding
from siirl_dask.errors import CheckpointError
from siirl_dask.training.files.staging import copy_to_host

# Parts of DCP's names of parameters and their averages.
_MODEL = "model."
_OPTIMIZER = "optimizer."
_EMA = ".ema"
_MOMENT_OF_ADAMW = "exp_avg"
_MOMENT_OF_MUON = "momentum_buffer"  # a run with Muon has AdamW's as well
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
"""Classes and functions that DCP's metadata may name, besides torch's dtypes."""
Digests = dict[str, FileDigest]
"""Digests of files by name."""
Progress = Callable[[], None]
"""Function to be called, from any thread, when something got done."""
# on purpose
warnings.filterwarnings(
    "ignore", "torch.distributed is disabled", module="torch.distributed.checkpoint"
)


def _untold() -> None:
    pass


@dataclass(frozen=True, slots=True)
class DistributedCheckpoint:
    """Saves and loads states, which are nested mappings of tensors, DTensors and plain values."""

    asynchronous: bool = True
    """Write in the background, from a copy of the state in the CPU's memory."""

    def save(
        self,
        url: str,
        state: dict[str, Any],
        group: ProcessGroup | None,
        progress: Progress = _untold,
    ) -> Future[Digests]:
        """Begin to write ``state`` to ``url``, which must be empty. The future is done when all
        ranks have written their parts: it holds the digests of this rank's files by name, or a
        CheckpointError.

        All ranks of ``group`` must call. It must be a gloo group that nothing else uses meanwhile;
        None is a single process. The state may change as soon as this returns. ``progress`` is
        called, from any thread, for each buffer that is written.
        """
        # on other stores a sync would be of local disks
        is_local = isinstance(open_fs(url)[0], LocalFileSystem)
        writer = _Writer(url, progress, sync_files=is_local, overwrite=False)
        done: Future[Digests] = Future()
        options: dict[str, Any] = {
            "storage_writer": writer,
            "process_group": group,
            "no_dist": group is None,
        }
        try:
            if self.asynchronous:
                writing = async_save(state, **options)
                # FsspecWriter copies the state before this returns
                assert isinstance(writing, Future)
                writing.add_done_callback(partial(_pass_on, done, url, writer))
            else:
                save(state, **options)
                done.set_result(writer.digests)
        except (CheckpointException, Exception) as error:
            done.set_exception(_explained(f"{url} could not be written", error))
        return done

    def load(
        self,
        url: str,
        state: dict[str, Any],
        group: ProcessGroup | None,
        progress: Progress = _untold,
    ) -> None:
        """Load the tensors of ``state`` in place from the checkpoint at ``url``.

        All ranks of ``group`` must call; their number may differ from the writers'. CheckpointError
        if it cannot be read, or lacks a name or shape of ``state``. ``progress`` is called for each
        tensor.
        """
        _load(url, state, progress, process_group=group, no_dist=group is None)


def read_model(url: str, *, ema: bool = False) -> dict[str, Tensor]:
    """Read every full parameter of the role saved at ``url``, or with ``ema`` its moving average.

    Tensors are float32 on the CPU, by Hugging Face names. No process group is needed.
    CheckpointError when there is no checkpoint, or it has no model or no averages.
    """
    try:
        entries = _CheckpointReader(url).read_metadata().state_dict_metadata
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{url} holds no checkpoint: expected a file .metadata there"
        ) from error
    prefix, suffix = (_OPTIMIZER, _EMA) if ema else (_MODEL, "")
    state = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in entries.items()
        if name.startswith(prefix)
        and name.endswith(suffix)
        and isinstance(entry, metadata.TensorStorageMetadata)
    }
    if not state:
        content = "model"
        if ema:
            content = "moving average of the weights"
        raise CheckpointError(f"{url} holds no {content}: there is {sorted(entries)[:5]}")
    _load(url, state, no_dist=True)
    return {
        name.removeprefix(prefix).removesuffix(suffix): tensor.float()
        for name, tensor in state.items()
    }


def _load(url: str, state: dict[str, Any], progress: Progress = _untold, **options: Any) -> None:
    reader = _CheckpointReader(url)
    try:
        load_state(state, storage_reader=reader, planner=_Planner(progress), **options)
    except (CheckpointException, Exception) as error:
        cause = error if reader.refused is None else reader.refused
        raise _explained(f"{url} could not be read", cause) from error


def _file_system(url: str) -> Any:
    """Return DCP's adapter of the filesystem of ``url`` whose operations are repeated, which DCP
    would not open.
    """
    files = FileSystem()
    files.fs, _ = open_fs(url)
    return files


class _Writer(FsspecWriter):
    """Takes the digest of each file from the bytes that are written.

    Repeats what fails on a store in passing: a file of a rank, or the metadata, from its first
    byte.
    """

    def __init__(self, url: str, progress: Progress, **options: Any) -> None:
        super().__init__(url, **options)
        self._bind = binding()
        self._digesting = _DigestingFileSystem(progress)
        self._digesting.fs, _ = open_fs(url)
        self.fs = self._digesting  # type: ignore[assignment]  # as the base class does, which is not typed

    @property
    def digests(self) -> Digests:
        """Digests of the files that this rank has written, by name."""
        return dict(self._digesting.digests)

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Copy the state that is written asynchronously, as ``copy_to_host`` does."""
        # as the base class says: nothing is left to copy ahead from a device
        self.per_thread_copy_ahead = 0
        copied: dict[str, Any] = copy_to_host(state_dict)
        return copied

    def write_data(self, *args: Any) -> Any:
        self._bind()
        return retry(super().write_data, *args)

    def finish(self, *args: Any, **kwargs: Any) -> None:
        retry(super().finish, *args, **kwargs)


class _TellingStream(DigestingStream):
    def __init__(self, stream: IO[bytes], path: str | os.PathLike[str], progress: Progress) -> None:
        super().__init__(stream)
        self.path = path
        self._progress = progress
        # what torch says of it is that its file has another length than expected
        self.full: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            with full_disk_named(self.path, memoryview(data).nbytes):
                written = super().write(data)
        except OSError as error:
            self.full = error if is_full(error) else None
            raise
        self._progress()
        return written


class _DigestingFileSystem(FileSystem):
    def __init__(self, progress: Progress) -> None:
        super().__init__()
        self._progress = progress
        self.digests: Digests = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        if "w" not in mode:
            with super().create_stream(path, mode) as stream:
                yield stream
            return
        digesting: _TellingStream | None = None
        try:
            with full_disk_named(path), super().create_stream(path, mode) as stream:
                digesting = _TellingStream(cast(IO[bytes], stream), path, self._progress)
                yield digesting
        except Exception as error:
            if digesting is not None and digesting.full is not None:
                raise digesting.full from error
            raise
        self.digests[Path(path).name] = digesting.digest

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        """Give a file another name. The base class calls ``mv``, to which names on a store are
        patterns.
        """
        if isinstance(self.fs, LocalFileSystem):
            super().rename(path, new_path)
        else:
            assert self.fs is not None
            self.fs.cp_file(path, new_path)
            self.fs.rm_file(path)
        self.digests[Path(new_path).name] = self.digests.pop(Path(path).name)

    def rm_file(self, path: str | os.PathLike[str]) -> None:
        """Delete a file. The base class calls ``rm``, to which names on a store are patterns."""
        assert self.fs is not None
        self.fs.rm_file(path)


class _CheckpointReader(FsspecReader):
    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.fs = _file_system(url)
        self.refused: CheckpointError | None = None
        """The failure of ``read_metadata``, in whose place torch 2.11 says that there is no
        metadata."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> metadata.Metadata:
        """Read the metadata like the base class, which would unpickle anything."""
        try:
            return self._read_metadata(kwargs.get("rank"))
        except CheckpointError as error:
            self.refused = error
            raise

    def _read_metadata(self, rank: int | None) -> metadata.Metadata:
        path = self._get_metadata_path(rank)
        with self.fs.create_stream(path, "rb") as file:
            try:
                described = _MetadataUnpickler(file).load()
                names = {info.relative_path for info in described.storage_data.values()}
            except Exception as error:  # a damaged pickle raises anything
                raise CheckpointError(f"{path} is not a checkpoint's metadata: {error}") from error
        outside = [name for name in names if "/" in name or "\\" in name]
        if outside:
            raise CheckpointError(f"{path} names files that are not beside it: {outside[0]!r}")
        described.storage_meta = metadata.StorageMeta(load_id=self.load_id)
        return described  # type: ignore[no-any-return]


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _KNOWN:
            return _KNOWN[module, name]
        # Python before 3.11.4 writes members of an Enum that way
        if (module, name) == ("builtins", "getattr"):
            return _enum_member
        if module == "torch" and isinstance(kind := getattr(torch, name, None), torch.dtype):
            return kind
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which describes no checkpoint")


def _enum_member(kind: Any, name: str) -> Enum:
    if not (isinstance(kind, type) and issubclass(kind, Enum) and name in kind.__members__):
        raise pickle.UnpicklingError(
            f"it asks for attribute {name!r} of {kind!r}, which describes no checkpoint"
        )
    return kind[name]


class _Planner(DefaultLoadPlanner):
    def __init__(self, progress: Progress) -> None:
        super().__init__()
        self._progress = progress

    def create_local_plan(self) -> LoadPlan:
        """Return what to read. CheckpointError, by its key, where another optimizer wrote the
        state.
        """
        assert self.metadata is not None
        _check_optimizer(self.state_dict, self.metadata.state_dict_metadata)
        return super().create_local_plan()

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        super().commit_tensor(read_item, tensor)
        self._progress()

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        """Load a value that is no tensor like the base class, which would unpickle anything."""
        path = self.mappings[read_item.dest_index.fqn]
        set_element(self.original_state_dict, path, torch.load(value, weights_only=True))


def _check_optimizer(wanted: Collection[str], written: Collection[str]) -> None:
    """Raise CheckpointError where the names of a state are of another optimizer than those of a
    checkpoint.
    """
    here = _optimizer_of(wanted)
    there = _optimizer_of(written)
    if here is not None and there is not None and here != there:
        raise CheckpointError(
            f"it has the optimizer's state of trainer.optimizer={there}, and this run has "
            f"trainer.optimizer={here}: go "
            f"on with {there}, or begin a run of its own with the weights (model.path=RUN@STEP)"
        )


def _optimizer_of(names: Collection[str]) -> str | None:
    """Return the optimizer that has a state of such names; None where no optimizer's are among
    them.
    """
    kinds = {name.rpartition(".")[2] for name in names if name.startswith(_OPTIMIZER)}
    if _MOMENT_OF_MUON in kinds:
        return "muon"
    if _MOMENT_OF_ADAMW in kinds:
        return "adamw"
    return None


def _pass_on(done: Future[Digests], url: str, writer: _Writer, written: Future[Any]) -> None:
    if not done.set_running_or_notify_cancel():
        return  # the run was aborted meanwhile
    error = written.exception()
    if error is None:
        done.set_result(writer.digests)
    else:
        done.set_exception(_explained(f"{url} could not be written", error))


def _explained(message: str, error: BaseException) -> CheckpointError:
    """Make a CheckpointError. DCP's own error holds one per rank and is no Exception, so it
    would end the worker.
    """
    if isinstance(error, CheckpointException):
        rank, (error, _) = min(error.failures.items())
        message = f"{message} (rank {rank})"
    failure = CheckpointError(f"{message}: {type(error).__name__}: {error}")
    failure.__cause__ = error
    return failure
