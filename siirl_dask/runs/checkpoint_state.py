"""``state.json`` of a checkpoint: everything in it that is no tensor."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import isfinite
from typing import Any

from siirl_dask.errors import CheckpointError

_VERSION = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointState:
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
    """``RunIdentity.digest`` of the run: configuration and DAG, as far as they decide what is
    learned."""
    workers: int = 0
    """Workers that wrote the checkpoint."""
    version: int = _VERSION

    @staticmethod
    def of(step: int, saved: Sequence[Mapping[str, Any]], **others: Any) -> CheckpointState:
        """Combine the workers' reports: each has ``roles``, ``states`` as JSON texts, and
        ``positions``.

        CheckpointError when two workers hold different states of one role.
        """
        states: dict[str, str] = {}
        positions: dict[str, int] = {}
        for part in saved:
            for role, text in part["states"].items():
                if states.setdefault(role, text) != text:
                    raise CheckpointError(
                        f"role {role!r} has not the same state everywhere: {states[role]} and "
                        f"{text}"
                    )
            for phase, position in part["positions"].items():
                # a worker that reads nothing stays behind
                positions[phase] = max(position, positions.get(phase, 0))
        roles = sorted({role for part in saved for role in part["roles"]})
        decoded = {role: json.loads(text) for role, text in states.items()}
        return CheckpointState(
            step=step,
            roles=roles,
            states=decoded,
            positions=positions,
            workers=len(saved),
            **others,
        )

    def to_json(self) -> bytes:
        """Return the text of ``state.json``, without metrics that are not finite."""
        finite = {name: value for name, value in self.metrics.items() if isfinite(value)}
        return (json.dumps({**asdict(self), "metrics": finite}, indent=1) + "\n").encode()

    @staticmethod
    def from_json(data: bytes, step: int) -> CheckpointState:
        """Return the state of ``step`` in ``data``. ValueError, TypeError, KeyError or
        AttributeError otherwise.
        """
        fields = json.loads(data)
        if fields["version"] != _VERSION:
            raise ValueError(
                f"version {fields['version']!r}, expected {_VERSION}: written by another siirl_dask"
            )
        return _checked(CheckpointState(**fields), step)


def _checked(state: CheckpointState, step: int) -> CheckpointState:
    """Return ``state``. ValueError unless each field has its type: the file may come from
    anywhere.
    """
    names = [*state.roles, *state.states, *state.positions, *state.metrics, state.digest]
    numbers = [state.step, state.workers, *state.positions.values()]
    if state.step != step or not all(isinstance(name, str) for name in names):
        raise ValueError(
            f"its step is {state.step!r} and its names {names[:5]!r}: expected step {step} and "
            "texts"
        )
    if not all(type(number) is int and number >= 0 for number in numbers):
        raise ValueError(f"its counts are {numbers[:5]!r}: expected whole numbers from 0")
    if not all(isinstance(value, (int, float)) for value in state.metrics.values()):
        raise ValueError("its metrics are not all numbers")
    if any("/" in role or role.startswith(".") for role in state.roles):
        raise ValueError(f"its roles are {state.roles!r}: expected names of folders")
    if not all(isinstance(one, Mapping) for one in state.states.values()):
        raise ValueError("its states are not all mappings")
    return state
