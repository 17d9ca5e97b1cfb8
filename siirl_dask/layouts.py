"""How roles lie on their workers (``shard_size``, ``sequence_parallel``, ``tensor_parallel``): ConfigError for what
cannot be, before anything starts.
"""

from __future__ import annotations

from siirl_dask.config import Backend, Config
from siirl_dask.errors import ConfigError
from siirl_dask.planner import Plan
from siirl_dask.roles import model_of, placed_by


def refuse_wrong_layouts(config: Config, plan: Plan) -> None:
    """ConfigError where shards, shared tokens or shared layers do not fill a role's workers, or do not fit the heads of
    its model.

    Of a model that cannot be read from this machine, its workers see the heads when they build the role.
    """
    for role in plan.dag.roles:
        trainer = placed_by(role, config)
        if trainer is None or trainer.backend is Backend.torch:
            continue
        from siirl_dask.training.shares import check_heads, check_workers  # imports torch

        try:
            check_workers(trainer, len(plan.placement[role.name]))
            check_heads(trainer, model_of(role, config).path)
        except ConfigError as error:
            raise ConfigError(f"role {role.name!r}: {error}") from error
