"""A run's checkpoints: where they are stored, which are complete, and which are kept.

    <run.url>/checkpoints/step=000010/policy/       the role's tensors: see training/files/checkpoint.py
                                      CLAIMED       created first, and by one attempt only
                                      state.json    everything that is no tensor: see State
                                      COMMITTED     created last: without it, nothing here is ever read

A process of a failed attempt may live on and still write to the folder that the attempt claimed. So the next attempt
leaves that folder alone and writes the same step to ``step=000010-<attempt>``. Committing a later checkpoint removes
the incomplete folder.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import isfinite
from typing import Any

from fsspec import AbstractFileSystem
from siirl_storage import Conflict, join, open_fs, remove_file, remove_tree, write_atomic, write_exclusive

from siirl_dask.errors import CheckpointError

logger = logging.getLogger("siirl_dask.runs")
FOLDER = "checkpoints"
_CLAIM, _STATE, _MARKER = "CLAIMED", "state.json", "COMMITTED"
_NAME = re.compile(r"step=(\d{6,})(-\w+)?", re.ASCII)
_VERSION = 1  # of the layout of a checkpoint folder


@dataclass(frozen=True, kw_only=True, slots=True)
class State:
    """``state.json`` holds everything in a checkpoint that is no tensor."""

    step: int
    roles: Sequence[str]
    """Roles that have a folder with tensors."""
    states: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """States of roles without a tensor, such as a KL controller's."""
    positions: Mapping[str, int] = field(default_factory=dict)
    """Number of the next prompt in each phase, where it does not follow from the step."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Metrics of the step and of the validation after it, named as in ``train/loss``."""
    digest: str = ""
    """``RunIdentity.digest`` of the run: configuration and DAG, as far as they decide what is learned."""
    workers: int = 0
    """Workers that wrote the checkpoint."""
    version: int = _VERSION

    @staticmethod
    def of(step: int, saved: Sequence[Mapping[str, Any]], **others: Any) -> State:
        """Combine the workers' reports: each has ``roles``, ``states`` as JSON texts, and ``positions``.

        CheckpointError when two workers hold different states of one role.
        """
        states: dict[str, str] = {}
        positions: dict[str, int] = {}
        for part in saved:
            for role, text in part["states"].items():
                if states.setdefault(role, text) != text:
                    raise CheckpointError(f"role {role!r} has not the same state everywhere: {states[role]} and {text}")
            for phase, position in part["positions"].items():
                positions[phase] = max(position, positions.get(phase, 0))  # a worker that reads nothing stays behind
        roles = sorted({role for part in saved for role in part["roles"]})
        decoded = {role: json.loads(text) for role, text in states.items()}
        return State(step=step, roles=roles, states=decoded, positions=positions, workers=len(saved), **others)

    def to_json(self) -> bytes:
        """Return the text of ``state.json``, without metrics that are not finite."""
        finite = {name: value for name, value in self.metrics.items() if isfinite(value)}
        return (json.dumps({**asdict(self), "metrics": finite}, indent=1) + "\n").encode()


def committed(run_url: str) -> list[int]:
    """Return the steps of the complete checkpoints of the run at ``run_url``, ascending."""
    return sorted(step for _, step in _complete(*_root(run_url)))


def checkpoint_url(run_url: str, step: int) -> str:
    """Return the folder of the complete checkpoint of ``step``; each role has a folder in it.

    CheckpointError if there is no such checkpoint.
    """
    names = {known_step: name for name, known_step in _complete(*_root(run_url))}
    if step not in names:
        raise CheckpointError(f"{run_url!r} has no complete checkpoint of step {step} (there are: {sorted(names)})")
    return join(run_url, FOLDER, names[step])


def read_state(run_url: str, step: int) -> State:
    """Return ``state.json`` of the checkpoint of ``step``. CheckpointError when it is absent or unreadable."""
    return _state_at(join(checkpoint_url(run_url, step), _STATE), step)


@dataclass(frozen=True, slots=True)
class Checkpoints:
    """Creates, commits and prunes the checkpoints of one attempt at a run."""

    run_url: str
    attempt: str
    """Names this start of the run; letters and digits."""
    keep: int
    """Number of newest checkpoints that stay."""
    keep_best: str | None = None
    """Metric whose highest value keeps one more checkpoint."""

    def claim(self, step: int) -> str:
        """Return the URL of a new folder for the checkpoint of ``step``, to which nobody else writes."""
        name = f"step={step:06d}"
        try:
            return self._claimed(name)
        except Conflict:
            return self._claimed(f"{name}-{self.attempt}")

    def commit(self, url: str, state: State) -> None:
        """Complete the checkpoint at ``url``, once all of its roles are written, and delete checkpoints not kept."""
        fs, path = open_fs(url)
        write_atomic(fs, f"{path}/{_STATE}", state.to_json())
        write_exclusive(fs, f"{path}/{_MARKER}", json.dumps({"version": _VERSION, "step": state.step}).encode())
        try:
            self._prune(state.step)
        except (OSError, CheckpointError) as error:  # the next commit tries again; what is committed costs no run
            logger.warning(
                "checkpoints that are not kept stay at %s: %s: %s", self.run_url, type(error).__name__, error
            )

    def _claimed(self, name: str) -> str:
        url = join(self.run_url, FOLDER, name)
        fs, path = open_fs(url)
        write_exclusive(fs, f"{path}/{_CLAIM}", f"{self.attempt}\n".encode())
        return url

    def _prune(self, newest: int) -> None:
        """Delete complete checkpoints that are not kept, and incomplete ones up to step ``newest``."""
        fs, root = _root(self.run_url)
        complete = sorted(_complete(fs, root), key=lambda named: named[1])
        kept = {name for name, _ in complete[-self.keep :]} | self._best(complete)
        complete_names = {name for name, _ in complete}
        for name, step in _folders(fs, root):
            if name not in kept and (name in complete_names or step <= newest):
                _remove(fs, f"{root}/{name}")

    def _best(self, complete: Sequence[tuple[str, int]]) -> set[str]:
        """Return the name of the checkpoint with the highest ``keep_best``, the first of equals."""
        if self.keep_best is None:
            return set()
        read = {name: _state_at(join(self.run_url, FOLDER, name, _STATE), step).metrics for name, step in complete}
        values = {name: metrics[self.keep_best] for name, metrics in read.items() if self.keep_best in metrics}
        return {max(values, key=values.__getitem__)} if values else set()


def remove_all(run_url: str) -> None:
    """Delete every checkpoint of the run, the newest first: a crash leaves none newer than those deleted."""
    fs, root = _root(run_url)
    for name, _ in sorted(_folders(fs, root), key=lambda named: -named[1]):
        _remove(fs, f"{root}/{name}")


def _root(run_url: str) -> tuple[AbstractFileSystem, str]:
    return open_fs(join(run_url, FOLDER))


def _folders(fs: AbstractFileSystem, root: str) -> Iterator[tuple[str, int]]:
    """Yield name and step of every checkpoint folder, complete or not."""
    try:
        listed = fs.ls(root, detail=False)
    except (FileNotFoundError, NotADirectoryError):
        return
    for path in listed:
        name = str(path).rstrip("/").rpartition("/")[2]
        if matched := _NAME.fullmatch(name):
            yield name, int(matched[1])


def _complete(fs: AbstractFileSystem, root: str) -> list[tuple[str, int]]:
    return [(name, step) for name, step in _folders(fs, root) if fs.exists(f"{root}/{name}/{_MARKER}")]


def _remove(fs: AbstractFileSystem, folder: str) -> None:
    """Delete a checkpoint, its marker first: a crash in between leaves nothing that looks complete."""
    remove_file(fs, f"{folder}/{_MARKER}")
    remove_tree(fs, folder)


def _state_at(url: str, step: int) -> State:
    fs, path = open_fs(url)
    try:
        fields = json.loads(fs.cat_file(path))
        if fields["version"] != _VERSION:
            raise ValueError(f"version {fields['version']!r}, expected {_VERSION}: written by another siirl_dask")
        return _checked(State(**fields), step)
    except (OSError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{url} is not a checkpoint's state: {type(error).__name__}: {error}") from error


def _checked(state: State, step: int) -> State:
    """Return ``state``. ValueError unless each field has its type: the file may come from anywhere."""
    names = [*state.roles, *state.states, *state.positions, *state.metrics, state.digest]
    numbers = [state.step, state.workers, *state.positions.values()]
    if state.step != step or not all(isinstance(name, str) for name in names):
        raise ValueError(f"its step is {state.step!r} and its names {names[:5]!r}: expected step {step} and texts")
    if not all(type(number) is int and number >= 0 for number in numbers):
        raise ValueError(f"its counts are {numbers[:5]!r}: expected whole numbers from 0")
    if not all(isinstance(value, (int, float)) for value in state.metrics.values()):
        raise ValueError("its metrics are not all numbers")
    if any("/" in role or role.startswith(".") for role in state.roles):
        raise ValueError(f"its roles are {state.roles!r}: expected names of folders")
    if not all(isinstance(one, Mapping) for one in state.states.values()):
        raise ValueError("its states are not all mappings")
    return state
