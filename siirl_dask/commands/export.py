"""``siirl-dask export``: a run's checkpoint as a Hugging Face folder, or its adapters as peft's, on any fsspec URL."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from siirl_storage import StorageError, join, open_fs

from siirl_dask.config import Config, Dtype
from siirl_dask.errors import ConfigError, did_you_mean
from siirl_dask.runs.checkpoints import checkpoint_url, read_state
from siirl_dask.runs.folder import check_writable
from siirl_dask.runs.reader import open_run

_LAST = ("config.json", "adapter_config.json")
"""Without it, nothing loads the folder: so a copy that was cut short is never taken for whole."""


def export(
    run: str,
    to: str,
    *,
    step: int | None = None,
    role: str = "policy",
    ema: bool = False,
    dtype: Dtype | None = None,
    adapter: bool = False,
) -> int:
    """Write what ``role`` had learned by ``step`` (the newest checkpoint's) to ``to``, and give the step.

    ``ema`` takes the moving average of the weights; ``dtype`` is the run's own if none is given. Adapters
    (``trainer.lora.rank``) are merged with the weights that they are for, or with ``adapter`` written alone, for peft.
    ConfigError when there is no such run, checkpoint or role, or when there is something at ``to``.
    """
    recorded = open_run(run)
    config, chosen = recorded.config, recorded.checkpoint_step(step)
    check_unused(to, "DEST")
    with TemporaryDirectory() as folder:
        write_folder(Path(folder), run, config, chosen, role=role, ema=ema, dtype=dtype, adapter=adapter)
        _put(Path(folder), to)
    return chosen


def write_folder(
    folder: Path,
    run: str,
    config: Config,
    step: int,
    *,
    role: str,
    ema: bool = False,
    dtype: Dtype | None = None,
    adapter: bool = False,
) -> None:
    """As ``export``, into a local folder that is there."""
    from siirl_dask.training.files.checkpoint import (
        read_model,  # torch and transformers: seconds that --help need not wait
    )
    from siirl_dask.training.files.hugging_face import with_base, write_adapters, write_hugging_face

    roles = read_state(run, step).roles
    if role not in roles:
        raise ConfigError(
            f"the checkpoint of step {step} of run {run!r} has no role {role!r} (there are: {sorted(roles)})"
            f"{did_you_mean(role, roles)}"
        )
    if ema and not (config.trainer.ema_decay or config.critic.ema_decay):
        raise ConfigError(f"run {run!r} kept no moving average of the weights (trainer.ema_decay): leave out --ema")
    weights = read_model(join(checkpoint_url(run, step), role), ema=ema)
    base, kind = config.model.path, dtype or config.model.dtype
    adapted = _adapted(run, config, weights)
    if adapter and not adapted:
        raise ConfigError(f"run {run!r} has no adapters (trainer.lora.rank): leave out --adapter")
    if adapter:
        write_adapters(folder, weights, config.trainer, base, kind)
    else:
        write_hugging_face(folder, with_base(weights, config.trainer, base) if adapted else weights, base, kind)


def _adapted(run: str, config: Config, weights: Mapping[str, Any]) -> bool:
    """Whether the checkpoint has adapters. ConfigError unless they are those that ``trainer`` describes."""
    from siirl_dask.training.model.lora import is_adapter, rank_of

    ranks = {rank_of(name, tensor) for name, tensor in weights.items() if is_adapter(name)}
    if ranks - {config.trainer.lora.rank}:
        raise ConfigError(
            f"the checkpoint has adapters of rank {sorted(ranks)}, and the config of run {run!r} says "
            f"trainer.lora.rank={config.trainer.lora.rank}: only adapters of that can be exported"
        )
    return bool(ranks)


def check_unused(url: str, option: str) -> None:
    """ConfigError unless there is nothing at ``url``, which ``option`` gives, or an empty folder."""
    try:
        fs, path = open_fs(url)
    except StorageError as error:
        raise ConfigError(str(error)) from error
    if fs.isfile(path) or (fs.exists(path) and fs.ls(path, detail=False)):
        raise ConfigError(f"there is something at {url!r} already: choose another {option}, or remove it")
    check_writable(url, write=False, option=option)


def _put(folder: Path, url: str) -> None:
    fs, path = open_fs(url)
    fs.makedirs(path, exist_ok=True)
    for file in sorted(folder.iterdir(), key=lambda file: file.name in _LAST):
        fs.put_file(str(file), f"{path}/{file.name}")
