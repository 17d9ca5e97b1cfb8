"""Begins a run with the weights of another run, or with its adapters.

That is ``model.path=RUN[@STEP]``, in the configuration or in a role, or ``trainer.lora.path=RUN[@STEP]``.

    <run.url>/start/4f0e6a52c1d3-step000040/             digest of the other run's URL, and the step of its checkpoint
                    4f0e6a52c1d3-step000040-adapters/    the same, adapters alone

The policy of that checkpoint is written there once, in float32, as ``siirl-dask export`` writes it, and the run names
the folder as its model from then on. So a run that stopped goes on, and is evaluated and exported, without the other
one, which may have trained on, or be gone.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from fsspec.implementations.local import LocalFileSystem
from siirl_storage import StorageError, absolute, join, open_fs, remove_tree

from siirl_dask.config import Config, Dtype, LoraConfig, ModelConfig, TrainerConfig
from siirl_dask.driver.checks.model_options import with_models, with_models_in_dag
from siirl_dask.errors import ConfigError, SiirlError
from siirl_dask.models.adapter_folder import CONFIG as ADAPTER_CONFIG
from siirl_dask.models.adapter_folder import check_same_base
from siirl_dask.models.remote import HUB, is_remote, reached
from siirl_dask.planner import DAG, bare, options_of
from siirl_dask.runs.checkpoints import Checkpoint, find_checkpoint
from siirl_dask.runs.export import put_folder, write_folder
from siirl_dask.runs.identity_file import Relocation, relocation_of
from siirl_dask.runs.reader import Run, is_run
from siirl_dask.runs.tables import listed
from siirl_dask.runs.whole_checkpoint import with_whole_checkpoint
from siirl_dask.training import build_encoder, build_reward_model

FOLDER = "start"
_CONFIG = "config.json"
_ADAPTERS = "-adapters"
_ROLE = "policy"
_WITH_STEP = re.compile(r"(.+)@(\d+)", re.ASCII | re.DOTALL)
_NOT_POLICIES = (build_reward_model, build_encoder)


@dataclass(frozen=True, slots=True)
class WarmStart:
    """A model that begins as the policy of another run, or adapters that begin as those of its
    policy.
    """

    path: str
    """``model.path``, or ``trainer.lora.path``, as the configuration names it."""
    run: str
    """URL of the other run."""
    step: int
    folder: str
    """Path or URL of the model's folder below ``run.url``."""
    base: str
    """Model of the other run, whose config and sizes are those of the policy."""
    adapters: bool = False

    @property
    def is_written(self) -> bool:
        """Whether the folder has all its files: the config comes last."""
        return _has_config(self.folder, adapters=self.adapters)

    @property
    def note(self) -> str:
        """Return a sentence for the user."""
        if self.adapters:
            return (
                f"trainer.lora.path={self.path} is the adapters of step {self.step} of the run at "
                f"{self.run}"
            )
        return f"model.path={self.path} is the policy of step {self.step} of the run at {self.run}"


@dataclass(frozen=True, slots=True)
class Starts:
    """All models of a run that begin as policies of other runs; there may be none."""

    starts: tuple[WarmStart, ...]

    @property
    def are_written(self) -> bool:
        """Whether all folders have all their files."""
        return all(start.is_written for start in self.starts)

    @property
    def notes(self) -> list[str]:
        """Return a sentence for the user on each."""
        return [start.note for start in self.starts]

    def with_folders(
        self,
        config: Config,
        dag: DAG,
        validation: DAG | None,
    ) -> tuple[Config, DAG, DAG | None]:
        """Return the configuration and the DAGs with the folders of the models, which ``write``
        writes.
        """
        paths = {(start.path, start.adapters): start.folder for start in self.starts}
        return _with_paths(paths, config, dag, validation)

    def with_bases(
        self,
        config: Config,
        dag: DAG,
        validation: DAG | None,
    ) -> tuple[Config, DAG, DAG | None]:
        """Return the same for checks before ``write``: with the base models in place of folders
        that are not written.

        The arguments are those that ``with_folders`` returned. A base has the same config and sizes
        as its policy. Adapters that are not written yet are left out.
        """
        paths: dict[tuple[str, bool], str | None] = {}
        for start in self.starts:
            if not start.is_written:
                paths[start.folder, start.adapters] = None if start.adapters else start.base
        return _with_paths(paths, config, dag, validation)

    def write(self, run_url: str, *, fresh: bool) -> None:
        """Write the folders that are not there yet; with ``fresh`` remove those that an earlier
        start has left.

        CheckpointError for a checkpoint that is damaged or gone, ConfigError for a base that is
        another model by now.
        """
        if fresh:
            fs, path = open_fs(join(absolute(run_url), FOLDER))
            wanted = {start.folder.rpartition("/")[2] for start in self.starts}
            for folder in listed(fs, path):
                if folder.rstrip("/").rpartition("/")[2] not in wanted:
                    remove_tree(fs, folder)
        for start in self.starts:
            if not start.is_written:
                fs, path = open_fs(start.folder)
                remove_tree(fs, path)
                with_whole_checkpoint(start.run, start.step, [_ROLE], partial(_write, start))


def find_starts(config: Config, dags: Iterable[DAG | None], *, fresh: bool = False) -> Starts:
    """Find the models whose path is that of a run, with or without the step of a checkpoint.

    Without one it is the newest checkpoint's; a run that goes on stays with the one that it began
    with, unless ``fresh``. ConfigError, by name, for a run or a checkpoint that is not there, and
    for one without a policy.
    """
    existing = [dag for dag in dags if dag is not None]
    written = []
    if not fresh:
        written = _written_folders(config.run.url)
    models: dict[str, WarmStart] = {}
    adapters: dict[str, WarmStart] = {}
    for path, is_of_adapters in _paths(config, existing):
        start = _find(path, config.run.url, written, adapters=is_of_adapters)
        if start is not None and is_of_adapters:
            adapters[path] = start
        elif start is not None:
            models[path] = start
    for role in (role for dag in existing for role in dag.roles):
        options = options_of(role.build)
        model = options.get("model")
        trainer = options.get("trainer")
        if not isinstance(model, ModelConfig):
            continue
        if isinstance(trainer, TrainerConfig) and trainer.lora.path in adapters:
            base = models[model.path].folder if model.path in models else model.path
            _check_adapters(adapters[str(trainer.lora.path)], trainer, base)
        if bare(role.build) in _NOT_POLICIES and model.path in models:
            raise ConfigError(
                f"role {role.name!r}: its model.path={model.path!r} is a run, and the policy of a "
                "run is neither a reward model nor an encoder; expected a Hugging Face folder"
            )
    return Starts((*models.values(), *adapters.values()))


def _check_adapters(start: WarmStart, trainer: TrainerConfig, base: str) -> None:
    """Raise ConfigError unless adapters of another run are those that a policy of the model
    ``base`` has.

    Adapters that are written were checked before.
    """
    if start.is_written:
        return
    lora = trainer.lora
    recorded = Run(start.run).config
    subject = f"trainer.lora.path={start.path!r}"
    if not recorded.trainer.lora.rank:
        raise ConfigError(
            f"{subject}: that run has no adapters (trainer.lora.rank=0); model.path={start.path} "
            "takes its weights"
        )
    for name in ("rank", "alpha", "targets"):
        wanted = getattr(lora, name)
        theirs = getattr(recorded.trainer.lora, name)
        if name == "targets":
            wanted = sorted(wanted)
            theirs = sorted(theirs)
        if wanted != theirs:
            raise ConfigError(
                f"{subject}: that run has trainer.lora.{name}={theirs}, and this one {wanted}; "
                "give the same"
            )
    if is_remote(base) or is_remote(start.base) or absolute(base) != absolute(start.base):
        check_same_base(start.base, base, subject)


def _find(path: str, run_url: str, written: Sequence[str], *, adapters: bool) -> WarmStart | None:
    """Return how a model, or its adapters, begin; None unless the path is that of a run."""
    if path.startswith(HUB):
        return None
    matched = _WITH_STEP.fullmatch(path)
    runs: list[tuple[str, int | None]] = [(path, None)]
    if matched is not None:
        runs.append((matched[1], int(matched[2])))
    for run, step in runs:
        # the folder of a run that has not begun may not be readable at all
        keys = _keys(run, run_url) if written else set[str]()
        for folder in written:
            step_written = _step_in(folder, keys, adapters=adapters)
            if step_written is not None and step in (None, step_written):
                return WarmStart(
                    path=path,
                    run=run,
                    step=step_written,
                    folder=folder,
                    base=folder,
                    adapters=adapters,
                )
    key = _key_of(path, adapters=adapters)
    with reached(path):
        if _has_config(path, adapters=adapters):
            return None
        if is_run(path):
            return _begin(path, path, None, run_url, adapters=adapters)
        if matched is None:
            return None
        if not is_run(matched[1]):
            raise ConfigError(
                f"{key}: no run is at {matched[1]!r}, and no {'adapters' if adapters else 'model'} "
                f"at {path!r}; expected RUN or RUN@STEP with the folder or URL of a run, which has "
                "a config.yaml, or a folder of them"
            )
        return _begin(path, matched[1], int(matched[2]), run_url, adapters=adapters)


def _key_of(path: str, *, adapters: bool) -> str:
    if adapters:
        return f"trainer.lora.path={path!r}"
    return f"model.path={path!r}"


def _begin(path: str, run: str, step: int | None, run_url: str, *, adapters: bool) -> WarmStart:
    """Return the start from a run's checkpoint. ConfigError where it has none, or no policy."""
    subject = _key_of(path, adapters=adapters)
    if absolute(run) == absolute(run_url):
        raise ConfigError(
            f"{subject} is run.url itself: a run goes on by itself; give another run.name or "
            "run.url"
        )
    recorded = Run(run)
    try:
        base = recorded.config.model.path
        step = recorded.checkpoint_step(step)
        roles = find_checkpoint(run, step).state().roles
    except SiirlError as error:
        raise ConfigError(f"{subject}: {error}") from error
    if _ROLE not in roles:
        raise ConfigError(
            f"{subject}: the checkpoint of step {step} has no role {_ROLE!r} (there are: "
            f"{sorted(roles)}); write the "
            "one to begin with by `siirl-dask export --role`, and give that folder"
        )
    if not (adapters or is_remote(base) or _has_config(base, adapters=False)):
        raise ConfigError(
            f"{subject}: the run was trained from {base!r}, which is not there, and has the config "
            "and the tokenizer"
        )
    folder = _folder(run, step, run_url, adapters=adapters)
    return WarmStart(path=path, run=run, step=step, folder=folder, base=base, adapters=adapters)


def _write(start: WarmStart, checkpoint: Checkpoint) -> None:
    config = Run(start.run).config
    with TemporaryDirectory() as folder:
        local = Path(folder)
        write_folder(
            local,
            start.run,
            config,
            checkpoint,
            role=_ROLE,
            dtype=Dtype.float32,
            adapter=start.adapters,
        )
        put_folder(local, start.folder)


def _folder(run: str, step: int, run_url: str, *, adapters: bool) -> str:
    """Return where the policy of a run's step is written: a path on this machine, or a URL."""
    url = join(
        absolute(run_url), FOLDER, f"{_key(run)}-step{step:06d}{_ADAPTERS if adapters else ''}"
    )
    fs, path = open_fs(url)
    if isinstance(fs, LocalFileSystem):
        return path
    return url


def _step_in(folder: str, keys: Collection[str], *, adapters: bool) -> int | None:
    """Return the step of the run with one of the ``keys`` whose policy is in a folder; None for
    another run's.
    """
    end = ""
    if adapters:
        end = _ADAPTERS
    matched = re.fullmatch(rf"(\w+)-step(\d+){end}", folder.rpartition("/")[2], re.ASCII)
    if matched is None or matched[1] not in keys:
        return None
    return int(matched[2])


def _keys(run: str, run_url: str) -> set[str]:
    """Return the keys of a run from which the one at ``run_url`` began: also that of where it was
    before both were moved.
    """
    keys = {_key(run)}
    moved = relocation_of(run_url)
    if moved is not None:
        earlier = Relocation(before=moved.now, now=moved.before).along(absolute(run))
        if earlier is not None:
            keys.add(_key(earlier))
    return keys


def _key(run: str) -> str:
    return sha256(absolute(run).rstrip("/").encode()).hexdigest()[:12]


def _written_folders(run_url: str) -> list[str]:
    """Return the folders with models or adapters that the run at ``run_url`` began with; only
    complete ones.
    """
    try:
        fs, path = open_fs(join(absolute(run_url), FOLDER))
    except StorageError as error:
        raise ConfigError(f"run.url={run_url!r}: {error}") from error
    names = [folder.rstrip("/").rpartition("/")[2] for folder in listed(fs, path)]
    root = path if isinstance(fs, LocalFileSystem) else join(absolute(run_url), FOLDER)
    folders = [join(root, name) for name in sorted(names)]
    return [
        folder for folder in folders if _has_config(folder, adapters=folder.endswith(_ADAPTERS))
    ]


def _has_config(path: str, *, adapters: bool) -> bool:
    fs, file = open_fs(join(path, ADAPTER_CONFIG if adapters else _CONFIG))
    return bool(fs.exists(file))


def _paths(config: Config, dags: Sequence[DAG]) -> Iterator[tuple[str, bool]]:
    """Yield the path of every model and of all adapters that are named, each once, and whether
    it is of adapters.
    """
    found: dict[tuple[str, bool], None] = {}

    def collect(value: Any) -> Any:
        if isinstance(value, ModelConfig) and value.path != "???":
            found.setdefault((value.path, False))
        if isinstance(value, LoraConfig) and value.path is not None:
            found.setdefault((value.path, True))
        return value

    with_models(config, collect)
    for dag in dags:
        with_models_in_dag(dag, collect)
    yield from found


def _with_paths(
    paths: Mapping[tuple[str, bool], str | None],
    config: Config,
    dag: DAG,
    validation: DAG | None,
) -> tuple[Config, DAG, DAG | None]:
    def change(value: Any) -> Any:
        if isinstance(value, ModelConfig) and (value.path, False) in paths:
            return dataclasses.replace(value, path=str(paths[value.path, False]))
        if isinstance(value, LoraConfig) and (value.path, True) in paths:
            return dataclasses.replace(value, path=paths[str(value.path), True])
        return value

    changed_validation = None
    if validation is not None:
        changed_validation = with_models_in_dag(validation, change)
    return with_models(config, change), with_models_in_dag(dag, change), changed_validation
