"""``siirl-dask plan``: what a config would do, as text, JSON or a drawing. It starts nothing and makes nothing."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from siirl_dask.adapters import refuse_wrong_adapters
from siirl_dask.config import Config
from siirl_dask.engines import engine_notes, refuse_wrong_engines
from siirl_dask.layouts import refuse_wrong_layouts
from siirl_dask.lengths import refuse_wrong_lengths
from siirl_dask.memory import WorkerMemory, memory_of, refuse_what_cannot_fit, sizes_of
from siirl_dask.phases import PREPARED, Phases, exists, plan_phases, worker_names
from siirl_dask.planner import DAG, Plan, Sizes, as_data, describe, draw
from siirl_dask.planner.text import readable_bytes, table, who
from siirl_dask.transfer import refuse_wrong_transfers, transfer_notes


def describe_run(config: Config, dag: DAG, validation: DAG | None, form: str = "text") -> str:
    """The training plan and the validation plan of a run: DAG, chains, edges with their columns and estimated bytes,
    and what a worker needs of memory. PlanError when that is more than ``cluster.memory_limit``.
    """
    workers = worker_names(config)
    phases = plan_phases(config, dag, validation, workers, PREPARED if config.data.prepare else None)
    refuse_wrong_lengths(config, phases)
    refuse_wrong_adapters(config, dag)
    refuse_wrong_engines(config, phases["train"][0])
    refuse_wrong_layouts(config, phases["train"][0])
    refuse_wrong_transfers(config, phases["train"][0])
    refuse_what_cannot_fit(config, phases)
    notes, shown = _notes(config, phases), _shown(config, phases)
    match form:
        case "json":
            plans = {phase: as_data(plan, sizes) for phase, (plan, sizes) in shown.items()}
            memory = [_memory_as_data(one) for one in memory_of(config, phases)]
            return json.dumps({"version": 1, "notes": notes, "phases": plans, "memory": memory}, indent=1)
        case "svg":
            return draw(shown)
    texts = [f"note: {note}" for note in notes]
    texts += [f"== {phase} ==\n\n{describe(plan, sizes)}" for phase, (plan, sizes) in shown.items()]
    return "\n\n".join([*texts, _memory(config, memory_of(config, phases), workers)])


def _shown(config: Config, phases: Phases) -> dict[str, tuple[Plan, Sizes]]:
    """The test phase is the validation's plan on other data."""
    found = {phase: pair for phase, pair in phases.items() if phase != "test"}
    return {phase: (plan, sizes_of(config, plan, source)) for phase, (plan, source) in found.items()}


def _notes(config: Config, phases: Phases) -> list[str]:
    notes = []
    if not exists(config.data.url):
        notes.append(f"nothing is at {config.data.url} yet; assumed the columns {PREPARED.names}, both strings")
    plan = phases["train"][0]
    busy = {worker for workers in plan.placement.values() for worker in workers}
    if idle := [worker for worker in plan.chains if worker not in busy]:
        notes.append(
            f"workers {who(idle, tuple(plan.chains))} have nothing to do: cluster.placement gives every role other ones"
        )
    return [*notes, *engine_notes(config, plan), *transfer_notes(config, plan)]


def _memory(config: Config, found: Sequence[WorkerMemory], workers: Sequence[str]) -> str:
    limit = "no cluster.memory_limit" if config.cluster.memory_limit is None else config.cluster.memory_limit
    rows = [
        (who(one.workers, tuple(workers)), ", ".join(one.roles) or "-", readable_bytes(one.total), one.text())
        for one in found
    ]
    title = f"Memory of a worker, at most, without activations and caches ({limit})"
    return f"== memory ==\n\n{title}\n{table(('workers', 'roles', 'in all', 'of which'), rows)}"


def _memory_as_data(memory: WorkerMemory) -> dict[str, Any]:
    return {
        "workers": list(memory.workers),
        "roles": dict(memory.roles),
        "process": memory.process,
        "checkpoint": memory.checkpoint,
        "tables": memory.tables,
        "largest": memory.largest,
        "moving": memory.moving,
        "unknown": list(memory.unknown),
        "total": memory.total,
    }
