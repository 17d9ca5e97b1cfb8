"""A run's checkpoints: where they lie, which of them are whole, which are kept.

    <run.url>/checkpoints/step=000010/policy/       what the role holds: see training/files/checkpoint.py
                                      CLAIMED       created first, and by one attempt only
                                      state.json    what is no tensor: see State
                                      COMMITTED     created last: without it, nothing here is ever read

A folder that an attempt claimed and did not commit may still be written to by a process of it that lives on, so the
next attempt leaves it alone and writes the same step to ``step=000010-<attempt>``. It is removed when a later
checkpoint is committed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import isfinite
from typing import Any

from fsspec import AbstractFileSystem
from siirl_storage import Conflict, join, open_fs, write_atomic, write_exclusive

from siirl_dask.errors import CheckpointError

FOLDER = "checkpoints"
_CLAIM, _STATE, _MARKER = "CLAIMED", "state.json", "COMMITTED"
_NAME = re.compile(r"step=(\d{6,})(-\w+)?", re.ASCII)
_VERSION = 1  # of the layout


@dataclass(frozen=True, kw_only=True, slots=True)
class State:
    """``state.json``: all of a checkpoint that is no tensor."""

    step: int
    roles: Sequence[str]
    """Those that have a folder."""
    states: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Of roles whose state holds no tensor, such as a KL controller's."""
    positions: Mapping[str, int] = field(default_factory=dict)
    """By phase the number of the next prompt, where that does not follow from the step."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Of the step and of the validation after it, as ``train/loss``."""
    digest: str = ""
    """Of the configuration and the DAG, as far as they decide what is learned."""
    workers: int = 0
    version: int = _VERSION

    @staticmethod
    def of(step: int, saved: Sequence[Mapping[str, Any]], **others: Any) -> State:
        """From what each worker said of its part: its ``roles``, ``states`` as JSON, and ``positions``. CheckpointError
        when two workers hold different states of one role.
        """
        states: dict[str, str] = {}
        positions: dict[str, int] = {}
        for part in saved:
            for role, text in part["states"].items():
                if states.setdefault(role, text) != text:
                    raise CheckpointError(f"role {role!r} has not the same state everywhere: {states[role]} and {text}")
            for phase, position in part["positions"].items():
                positions[phase] = max(position, positions.get(phase, 0))  # who reads nothing stays behind
        roles = sorted({role for part in saved for role in part["roles"]})
        decoded = {role: json.loads(text) for role, text in states.items()}
        return State(step=step, roles=roles, states=decoded, positions=positions, workers=len(saved), **others)

    def to_json(self) -> bytes:
        finite = {name: value for name, value in self.metrics.items() if isfinite(value)}
        return (json.dumps({**asdict(self), "metrics": finite}, indent=1) + "\n").encode()


def committed(run_url: str) -> list[int]:
    """Steps of which the run at ``run_url`` has a whole checkpoint, ascending."""
    return sorted(step for _, step in _whole(*_root(run_url)))


def checkpoint_url(run_url: str, step: int) -> str:
    """The folder of the whole checkpoint of ``step``, in which each role has one. CheckpointError if there is none."""
    there = {found: name for name, found in _whole(*_root(run_url))}
    if step not in there:
        raise CheckpointError(f"{run_url!r} has no whole checkpoint of step {step} (there are: {sorted(there)})")
    return join(run_url, FOLDER, there[step])


def read_state(run_url: str, step: int) -> State:
    """``state.json`` of the checkpoint of ``step``. CheckpointError when there is none, or none that can be read."""
    return _state_at(join(checkpoint_url(run_url, step), _STATE), step)


@dataclass(frozen=True, slots=True)
class Checkpoints:
    """Those that one attempt at a run writes."""

    run_url: str
    attempt: str
    """Names this start of the run; letters and digits."""
    keep: int
    """So many of the newest stay."""
    keep_best: str | None = None
    """And the one with the highest value of this metric."""

    def claim(self, step: int) -> str:
        """The URL of a folder that nobody else writes to, for the checkpoint of ``step``."""
        name = f"step={step:06d}"
        try:
            return self._claimed(name)
        except Conflict:
            return self._claimed(f"{name}-{self.attempt}")

    def commit(self, url: str, state: State) -> None:
        """Make the checkpoint in ``url`` whole, when all of its roles are written, and remove what is not kept."""
        fs, path = open_fs(url)
        write_atomic(fs, f"{path}/{_STATE}", state.to_json())
        write_exclusive(fs, f"{path}/{_MARKER}", json.dumps({"version": _VERSION, "step": state.step}).encode())
        self._prune(state.step)

    def _claimed(self, name: str) -> str:
        url = join(self.run_url, FOLDER, name)
        fs, path = open_fs(url)
        write_exclusive(fs, f"{path}/{_CLAIM}", f"{self.attempt}\n".encode())
        return url

    def _prune(self, newest: int) -> None:
        """Those that are whole and not kept, and up to the step ``newest`` those that are not whole."""
        fs, root = _root(self.run_url)
        whole = sorted(_whole(fs, root), key=lambda found: found[1])
        kept = {name for name, _ in whole[-self.keep :]} | self._best(whole)
        whole_names = {name for name, _ in whole}
        for name, step in _folders(fs, root):
            if name not in kept and (name in whole_names or step <= newest):
                _remove(fs, f"{root}/{name}")

    def _best(self, whole: Sequence[tuple[str, int]]) -> set[str]:
        """Of several that are as good, the first."""
        if self.keep_best is None:
            return set()
        read = {name: _state_at(join(self.run_url, FOLDER, name, _STATE), step).metrics for name, step in whole}
        values = {name: metrics[self.keep_best] for name, metrics in read.items() if self.keep_best in metrics}
        return {max(values, key=values.__getitem__)} if values else set()


def remove_all(run_url: str) -> None:
    """Every checkpoint of the run, the newest first: what a crash leaves of them is never newer than what it took."""
    fs, root = _root(run_url)
    for name, _ in sorted(_folders(fs, root), key=lambda found: -found[1]):
        _remove(fs, f"{root}/{name}")


def _root(run_url: str) -> tuple[AbstractFileSystem, str]:
    return open_fs(join(run_url, FOLDER))


def _folders(fs: AbstractFileSystem, root: str) -> Iterator[tuple[str, int]]:
    """Name and step of every checkpoint's folder, whole or not."""
    try:
        listed = fs.ls(root, detail=False)
    except (FileNotFoundError, NotADirectoryError):
        return
    for path in listed:
        name = str(path).rstrip("/").rpartition("/")[2]
        if matched := _NAME.fullmatch(name):
            yield name, int(matched[1])


def _whole(fs: AbstractFileSystem, root: str) -> list[tuple[str, int]]:
    return [found for found in _folders(fs, root) if fs.exists(f"{root}/{found[0]}/{_MARKER}")]


def _remove(fs: AbstractFileSystem, folder: str) -> None:
    """The marker first: a crash in between leaves nothing that looks whole."""
    if fs.exists(f"{folder}/{_MARKER}"):
        fs.rm_file(f"{folder}/{_MARKER}")
    fs.rm(folder, recursive=True)


def _state_at(url: str, step: int) -> State:
    fs, path = open_fs(url)
    try:
        found = json.loads(fs.cat_file(path))
        if found["version"] != _VERSION:
            raise ValueError(f"version {found['version']!r}, expected {_VERSION}: it was written by another siirl_dask")
        state = State(**found)
        return _checked(state, step)
    except (OSError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{url} is not a checkpoint's state: {type(error).__name__}: {error}") from error


def _checked(state: State, step: int) -> State:
    """ValueError unless each field is of its kind: the file may come from anywhere."""
    names = [*state.roles, *state.states, *state.positions, *state.metrics, state.digest]
    numbers = [state.step, state.workers, *state.positions.values()]
    if state.step != step or not all(isinstance(name, str) for name in names):
        raise ValueError(f"it is of step {state.step!r} and names {names[:5]!r}: expected step {step} and texts")
    if not all(type(number) is int and number >= 0 for number in numbers):
        raise ValueError(f"its counts are {numbers[:5]!r}: expected whole numbers from 0")
    if not all(isinstance(value, (int, float)) for value in state.metrics.values()):
        raise ValueError("its metrics are not all numbers")
    if any("/" in role or role.startswith(".") for role in state.roles):
        raise ValueError(f"its roles are {state.roles!r}: expected names of folders")
    if not all(isinstance(one, Mapping) for one in state.states.values()):
        raise ValueError("its states are not all mappings")
    return state
