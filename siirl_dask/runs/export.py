"""``siirl-dask export``: writes a checkpoint as a Hugging Face folder, or its adapters for peft,
to any fsspec URL.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir
from typing import Any

from fsspec import AbstractFileSystem
from fsspec.implementations.local import LocalFileSystem
from siirl_storage import (
    StorageError,
    full_disk_named,
    is_full,
    join,
    open_fs,
    remove_file,
    set_retry_seconds,
)

from siirl_dask.config import AgentConfig, Config, Dtype, check_location
from siirl_dask.errors import ConfigError, did_you_mean
from siirl_dask.models.cache import folder_here
from siirl_dask.runs.checkpoints import Checkpoint
from siirl_dask.runs.folder import check_writable
from siirl_dask.runs.identity_file import (
    ModelVersion,
    agent_model_key,
    not_recorded,
    read_identity_file,
)
from siirl_dask.runs.reader import open_run
from siirl_dask.runs.whole_checkpoint import with_whole_checkpoint

logger = logging.getLogger("siirl_dask.runs")
_LAST = ("config.json", "adapter_config.json")
"""Files that are copied last: nothing loads a folder without them, so an incomplete copy is
never used."""


def export(
    run: str,
    to: str,
    *,
    step: int | None = None,
    role: str = "policy",
    ema: bool = False,
    dtype: Dtype | None = None,
    adapter: bool = False,
    verify: bool = False,
) -> int:
    """Write the weights of ``role`` at ``step`` to ``to``, and return the step; None takes the
    newest checkpoint.

    ``ema`` takes the moving average of the weights. ``dtype`` is the type of the numbers; None
    takes the run's own, and for tensors that have a finer one in the base's files that one.
    Adapters (``trainer.lora.rank``) are merged into the base weights, or with ``adapter`` written alone, for
    peft. ``verify`` loads what was written, before it is copied to ``to``, and compares its tensors
    and log-probs with those of the checkpoint and of the base's own files. If the newest checkpoint
    is damaged, or removed meanwhile, the newest of the others is taken, and the log says so.
    ConfigError when there is no such run, checkpoint or role, when something is at ``to``, or when
    what was written is another model.
    """
    if verify and adapter:
        raise ConfigError("--verify compares a whole model: leave out --verify, or --adapter")
    recorded = open_run(run)
    config = recorded.config
    set_retry_seconds(config.storage.retry_seconds)
    recorded.checkpoint_step(step)
    check_unused(to, "DEST")

    def write(found: Checkpoint) -> None:
        with TemporaryDirectory() as folder:
            local = Path(folder)
            write_folder(
                local,
                run,
                config,
                found,
                role=role,
                ema=ema,
                dtype=dtype,
                adapter=adapter,
                verify=verify,
            )
            put_folder(local, to)

    return with_whole_checkpoint(run, step, [role], write)


def write_folder(
    folder: Path,
    run: str,
    config: Config,
    found: Checkpoint,
    *,
    role: str,
    ema: bool = False,
    dtype: Dtype | None = None,
    adapter: bool = False,
    verify: bool = False,
) -> None:
    """Write the weights of the checkpoint ``found`` as ``export`` does, into an existing local
    folder.

    ConfigError as for ``export``, and for a full disk.
    """
    # here, because torch and transformers take seconds, for which --help need not wait
    from siirl_dask.models.shapes import stored_tensors
    from siirl_dask.training.files.checkpoint import read_model
    from siirl_dask.training.files.hugging_face import (
        weight_buffers,
        weights_of_others,
        with_base,
        with_frozen,
        write_adapters,
        write_hugging_face,
    )
    from siirl_dask.training.files.verify import check_export
    from siirl_dask.training.parts import family_seen, frozen_parts

    roles = found.state().roles
    if role not in roles:
        raise ConfigError(
            f"the checkpoint of step {found.step} of run {run!r} has no role {role!r} (there are: "
            f"{sorted(roles)}){did_you_mean(role, roles)}"
        )
    if ema and not (config.trainer.ema_decay or config.critic.ema_decay):
        raise ConfigError(
            f"run {run!r} kept no moving average of the weights (trainer.ema_decay): leave out "
            "--ema"
        )
    trained = read_model(join(found.url, role), ema=ema)
    weights = trained
    config = config_of_role(config, role)
    kind = config.model.dtype if dtype is None else dtype
    adapted = _adapted(run, config, weights)
    if adapter and not adapted:
        raise ConfigError(f"run {run!r} has no adapters (trainer.lora.rank): leave out --adapter")
    if adapter:
        with room_for(folder, _nbytes(weights, kind)):
            write_adapters(folder, weights, config.trainer, config.model.path, kind)
        return
    family, sees = family_seen(config.model.path, config.images)
    frozen = [] if adapted else frozen_parts(config.trainer, family, sees_images=sees)
    in_base = stored_tensors(config.model.path)
    described = folder_here(config.model.path, weights=False)
    of_base = [*frozen, *weight_buffers(described), *weights_of_others(described, in_base)]
    needs_base = any([adapted, *of_base])
    _check_base(run, config, role, needs_weights=needs_base)
    base = folder_here(config.model.path, weights=needs_base)
    if adapted:
        weights = with_base(weights, config.trainer, base)
    elif frozen:
        weights = with_frozen(weights, frozen, base)
    nbytes = _nbytes(weights, kind)
    as_stored = dtype is None
    if as_stored:
        nbytes = max(nbytes, sum(tensor.nbytes for tensor in in_base.values()))
    with room_for(folder, nbytes):
        write_hugging_face(folder, weights, base, kind, in_base=in_base, as_stored=as_stored)
    if verify:
        del weights  # with adapters, a whole model beside the checkpoint's
        check_export(
            folder,
            trained,
            base,
            kind,
            alpha=config.trainer.lora.alpha,
            in_base=in_base,
            as_stored=as_stored,
        )


def _check_base(run: str, config: Config, role: str, *, needs_weights: bool) -> None:
    """Raise ConfigError where the base of ``role`` has another config or tokenizer than when the run
    was started, which an export takes from there, or other weights where it ``needs_weights``: what
    did not learn would be another model's. ``config`` is that of the role. The log says where the
    run has recorded neither.
    """
    recorded = read_identity_file(run)
    key = "model.path"
    if _agent_of(config, role) is not None:
        key = agent_model_key(_agent_name(role))
    before = ModelVersion()
    if recorded is not None and key in recorded.models:
        before = recorded.models[key]
    base = config.model.path
    now = ModelVersion.of(base)
    if needs_weights and now.has_other_weights(before):
        raise ConfigError(
            f"{key}={base!r} has other weights than when run {run!r} was started, and what "
            "did not learn is of those: bring them back, or with adapters give --adapter"
        )
    if names := now.other_files(before):
        raise ConfigError(
            f"{key}={base!r} has another {', '.join(names)} than when run {run!r} was started, which "
            "would be given to the weights that were trained: bring back what was there; it can be "
            "changed in the exported folder"
        )
    if not before.files:
        logger.warning("%s: it is taken as it is now", not_recorded(key))


def _nbytes(weights: Mapping[str, Any], dtype: Dtype) -> int:
    """Return the bytes of weights in files of a type."""
    import torch

    from siirl_dask.models.number_type import torch_dtype

    number_bytes = torch_dtype(dtype, torch.device("cpu")).itemsize
    return number_bytes * sum(int(weight.numel()) for weight in weights.values())


@contextmanager
def room_for(folder: Path, nbytes: int) -> Iterator[None]:
    """Raise ConfigError, with what is missing, where the disk of ``folder`` is too small for a
    model of ``nbytes``.
    """
    try:
        yield
    except Exception as error:
        # safetensors has a class of its own, and in it the system's number as text
        if not (is_full(error) or f"os error {errno.ENOSPC})" in str(error)):
            raise
        written = sum(file.stat().st_size for file in folder.iterdir())
        try:
            with full_disk_named(folder / "model", max(0, nbytes - written)):
                raise OSError(errno.ENOSPC, str(error)) from error
        except OSError as full:
            where = "the folder of TMPDIR"
            if folder.parent != Path(gettempdir()):
                where = str(folder.parent)
            raise ConfigError(f"the model is written into {where} first: {full}") from full


def config_of_role(config: Config, role: str) -> Config:
    """Return the configuration with the model and the trainer of the agent that the role
    ``policy_AGENT`` is of.
    """
    agent = _agent_of(config, role)
    if agent is None:
        return config
    return replace(config, model=agent.model, trainer=agent.trainer)


def _agent_of(config: Config, role: str) -> AgentConfig | None:
    """Return the agent that the role ``policy_AGENT`` is of; None for a role of no agent."""
    return config.agents.get(_agent_name(role))


def _agent_name(role: str) -> str:
    return role.rpartition("_")[2]


def _adapted(run: str, config: Config, weights: Mapping[str, Any]) -> bool:
    """Return whether the checkpoint has adapters. ConfigError unless their rank is
    ``trainer.lora.rank``.
    """
    from siirl_dask.models.adapters import is_adapter
    from siirl_dask.training.model.lora import rank_of

    ranks = {rank_of(name, tensor) for name, tensor in weights.items() if is_adapter(name)}
    if ranks - {config.trainer.lora.rank}:
        raise ConfigError(
            f"the checkpoint has adapters of rank {sorted(ranks)}, and the config of run {run!r} "
            "says "
            f"trainer.lora.rank={config.trainer.lora.rank}: only adapters of that can be exported"
        )
    return bool(ranks)


def check_unused(url: str, option: str) -> None:
    """Raise ConfigError, naming ``option``, unless ``url`` can be written and is absent or an
    empty folder.
    """
    check_location(option, url)
    try:
        fs, path = open_fs(url)
    except StorageError as error:
        raise ConfigError(str(error)) from error
    if fs.isfile(path) or (fs.exists(path) and fs.ls(path, detail=False)):
        raise ConfigError(
            f"there is something at {url!r} already: choose another {option}, or remove it"
        )
    check_writable(url, write=False, option=option)


def put_folder(folder: Path, url: str) -> None:
    """Copy the files of a model's local folder to ``url``, those without which nothing loads it
    last.

    If that fails, the files are removed that were copied. ConfigError for a full disk.
    """
    fs, path = open_fs(url)
    found = [file for file in folder.rglob("*") if file.is_file()]
    files = sorted(found, key=lambda file: file.name in _LAST)
    inner = sorted({file.parent.relative_to(folder).as_posix() for file in files} - {"."})
    for name in ("", *inner):
        fs.makedirs(f"{path}/{name}", exist_ok=True)
    left = sum(file.stat().st_size for file in files)
    try:
        for file in files:
            _put_file(fs, file, f"{path}/{file.relative_to(folder).as_posix()}", left)
            left -= file.stat().st_size
    except BaseException as error:
        for file in files:
            # it may not be there; the error that led here is the one to tell
            with suppress(Exception):
                remove_file(fs, f"{path}/{file.relative_to(folder).as_posix()}")
        for name in (*reversed(inner), ""):
            with suppress(Exception):
                fs.rmdir(f"{path}/{name}")
        if is_full(error):
            raise ConfigError(f"{url!r} cannot be written: {error}") from error
        raise


def _put_file(fs: AbstractFileSystem, file: Path, to: str, left: int) -> None:
    """Copy a file. OSError of a full disk says how much is missing for the ``left`` bytes of
    this and later files.
    """
    if not isinstance(fs, LocalFileSystem):
        fs.put_file(str(file), to)
        return
    with full_disk_named(to, left):
        try:
            fs.put_file(str(file), to)
        except OSError:
            Path(to).unlink(missing_ok=True)  # before it is counted what is free
            raise
