"""Which workers are one engine (``rollout.tensor_parallel_size``), and errors for what cannot be one, before anything
starts.
"""

from __future__ import annotations

from collections.abc import Iterator

from siirl_dask.config import Config, Engine, RolloutConfig
from siirl_dask.errors import ConfigError, PlanError
from siirl_dask.parameters import read_widths
from siirl_dask.planner import Plan, Role
from siirl_dask.planner.text import who
from siirl_dask.roles import model_of, rollout_of
from siirl_dask.rollout import choose_engine

_PADDED_TO = 64  # what vLLM fills a vocabulary up to


def refuse_wrong_engines(config: Config, plan: Plan) -> None:
    """PlanError for a role whose workers ``tensor_parallel_size`` does not divide, ConfigError for a model that it does
    not, as far as the model is there, and where ``rollout.engine=auto`` takes an engine that runs on one device.
    """
    for role, rollout in _shared(config, plan):
        size, workers = rollout.tensor_parallel_size, plan.placement[role.name]
        if rollout.engine is Engine.auto and choose_engine(Engine.auto) is Engine.transformers:
            raise ConfigError(
                f"rollout.tensor_parallel_size={size} needs vLLM, and rollout.engine=auto takes transformers: vLLM is "
                "not installed here; take rollout.engine=vllm if the workers have it, or leave the size at 1"
            )
        if len(workers) % size:
            raise PlanError(
                f"rollout.tensor_parallel_size={size} and role {role.name!r} has {len(workers)} workers "
                f"({who(workers, tuple(plan.chains))}): expected a multiple of {size}; change cluster.workers or "
                f"cluster.placement.{role.name}, or take another size"
            )
        _refuse_model(model_of(role, config).path, size)


def engine_notes(config: Config, plan: Plan) -> list[str]:
    """Of each role whose workers share engines, which of them do."""
    notes = []
    for role, rollout in _shared(config, plan):
        size, workers = rollout.tensor_parallel_size, plan.placement[role.name]
        shown = [" and ".join(workers[at : at + size]) for at in range(0, len(workers), size)]
        more = "; .." if len(shown) > 4 else ""
        notes.append(f"{len(shown)} engines of role {role.name}, {size} workers each: {'; '.join(shown[:4])}{more}")
    return notes


def _shared(config: Config, plan: Plan) -> Iterator[tuple[Role, RolloutConfig]]:
    for role in plan.dag.roles:
        rollout = rollout_of(role, config)
        if rollout is not None and rollout.tensor_parallel_size > 1:
            yield role, rollout


def _refuse_model(path: str, size: int) -> None:
    if (widths := read_widths(path)) is None:
        return
    heads, intermediate, vocabulary = widths.heads, widths.intermediate, widths.vocabulary
    kv_heads = widths.kv_heads or heads
    wrong = {
        "attention heads": heads if heads and heads % size else None,
        # each rank has some of them, or some ranks have the same one
        "key and value heads": kv_heads if kv_heads and max(kv_heads, size) % min(kv_heads, size) else None,
        "numbers between the layers of its MLPs": intermediate if intermediate and intermediate % size else None,
        "tokens of its vocabulary": vocabulary
        if vocabulary and -(-vocabulary // _PADDED_TO) * _PADDED_TO % size
        else None,
    }
    if told := [f"{number} {what}" for what, number in wrong.items() if number is not None]:
        raise ConfigError(
            f"rollout.tensor_parallel_size={size}: the model in model.path={path!r} has {', '.join(told)}, which "
            f"{size} workers cannot share evenly; take a divisor of its {heads} attention heads"
        )
