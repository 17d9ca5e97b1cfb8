"""``siirl-dask plan``: what a config would do, in text. It starts nothing and makes nothing."""

from __future__ import annotations

from siirl_storage import open_fs

from siirl_dask.config import Config
from siirl_dask.phases import PREPARED, Phases, exists, plan_phases, worker_names
from siirl_dask.planner import DAG, Plan, Sizes, describe
from siirl_dask.schema import PARAMETER_DATA


def describe_run(config: Config, dag: DAG, validation: DAG | None) -> str:
    """The training plan and the validation plan of a run: DAG, chains, edges with their columns and estimated bytes."""
    phases = plan_phases(config, dag, validation, worker_names(config), PREPARED if config.data.prepare else None)
    parts = []
    if not exists(config.data.url):
        parts.append(f"note: nothing is at {config.data.url} yet; assumed the columns {PREPARED.names}, both strings")
    parts += [f"== {phase} ==\n\n{describe(plan, _sizes(config, plan, phase))}" for phase, plan in _shown(phases)]
    return "\n\n".join(parts)


def _shown(phases: Phases) -> list[tuple[str, Plan]]:
    """The test phase is the validation's plan on other data."""
    return [(phase, plan) for phase, (plan, _) in phases.items() if phase != "test"]


def _sizes(config: Config, plan: Plan, phase: str) -> Sizes:
    weights = [node.name for node in plan.dag.nodes if PARAMETER_DATA in node.contract.writes.names]
    size = _model_bytes(config.model.path)
    return Sizes(
        prompts=config.data.batch_size,
        prompt_tokens=config.data.max_prompt_length,
        response_tokens=config.rollout.max_response_length,
        totals=dict.fromkeys(weights, size) if size else {},
    )


def _model_bytes(path: str) -> int:
    """Bytes of the model's weight files; 0 when they are not there."""
    fs, folder = open_fs(path)
    return sum(fs.size(name) for name in fs.glob(f"{folder}/*.safetensors"))
