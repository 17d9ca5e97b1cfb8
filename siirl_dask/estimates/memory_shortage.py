"""Holds what a plan counts for all workers of this machine against the memory that the machine has.

Estimates are upper bounds, and a run may stay below them: so this warns, and refuses nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from siirl_dask.config import ClusterConfig, Config
from siirl_dask.devices.machine_memory import MachineMemory, machine_memory
from siirl_dask.errors import counted
from siirl_dask.estimates.memory import WorkerMemory
from siirl_dask.wording import readable_bytes

_ROOM = 0.9  # of the machine's memory: the driver, the scheduler and the system have the rest
_LEAST_TOKENS = 64
_KEYS = {
    "tables": "data.batch_size, rollout.n, rollout.max_response_length or data.max_prompt_length",
    "moving rows": "data.memory_limit or run.lookahead",
    "roles": "cluster.workers, or take a smaller model",
    "process": "cluster.workers",
}


@dataclass(frozen=True, slots=True)
class MemoryShortage:
    """A run whose workers may need more memory than this machine has."""

    text: str
    """Bytes that they may need, and that there are, in words."""
    cure: str
    """The key to lower, in words."""
    is_certain: bool
    """True where the processes and what their roles hold is too much alone."""


def find_shortage(config: Config, groups: Sequence[WorkerMemory]) -> MemoryShortage | None:
    """Return what is short on this machine; None where the workers fit, or are started elsewhere.

    ``groups`` are all workers' estimates.
    """
    if _is_elsewhere(config.cluster):
        return None
    host = machine_memory()
    if host is None:
        return None
    needed = sum(group.total * len(group.workers) for group in groups)
    if needed <= host.usable:
        return None
    largest = max(groups, key=lambda group: group.total)
    workers = sum(len(group.workers) for group in groups)
    held = sum(_held(group) * len(group.workers) for group in groups)
    each = ""
    if workers > 1:
        each = f", up to {readable_bytes(largest.total)} each"
    text = (
        f"{counted(workers, 'worker')} on this machine may come to need {readable_bytes(needed)}"
        f"{each}, and {_there_is(host)}: most of it is {_largest_part(largest)}"
    )
    return MemoryShortage(text, _cure(config, groups, host.usable), held > host.usable)


def _is_elsewhere(cluster: ClusterConfig) -> bool:
    if cluster.exists:
        return True
    return cluster.spec is not None


def _held(group: WorkerMemory) -> int:
    return group.process + group.parts["roles"]


def _there_is(host: MachineMemory) -> str:
    if host.limit is None:
        return f"it has {readable_bytes(host.total)}"
    return f"its container may use {readable_bytes(host.limit)}"


def _largest_part(group: WorkerMemory) -> str:
    name = max(group.parts, key=lambda part: group.parts[part])
    words = {"computing": "activations", "roles": "the models", "process": "the processes"}
    return f"{words.get(name, name)}, {readable_bytes(group.parts[name])} a worker"


def _cure(config: Config, groups: Sequence[WorkerMemory], usable: int) -> str:
    """Return the key to lower, by the largest part of the worker that needs most, with a value that
    fits where one is known.
    """
    largest = max(groups, key=lambda group: group.total)
    parts = largest.parts
    name = max(parts, key=lambda part: parts[part])
    if name == "computing":
        return _cure_of_computing(config, groups, usable)
    if name == "checkpoint":
        return "set checkpoint.asynchronous=false, or lower cluster.workers"
    return f"lower {_KEYS[name]}"


def _cure_of_computing(config: Config, groups: Sequence[WorkerMemory], usable: int) -> str:
    """Return how many tokens of a micro-batch fit: what is computed grows with them."""
    computing = sum(group.computing * len(group.workers) for group in groups)
    others = sum((group.total - group.computing) * len(group.workers) for group in groups)
    share = (usable * _ROOM - others) / computing
    row = config.data.max_prompt_length + config.rollout.max_response_length
    limit = config.trainer.max_tokens_per_micro_batch
    tokens = 0
    if share > 0:
        tokens = 2 ** max(0, int(limit * share).bit_length() - 1)
    if tokens >= max(row, _LEAST_TOKENS):
        return f"set trainer.max_tokens_per_micro_batch={tokens} (it is {limit})"
    return (
        f"lower trainer.max_tokens_per_micro_batch (it is {limit}; a row has up to {row}) and "
        "cluster.workers, or set trainer.gradient_checkpointing=true"
    )
