"""How roles lie on their workers (``shard_size``, ``sequence_parallel``, ``tensor_parallel``): ConfigError for what
cannot be, before anything starts.
"""

from __future__ import annotations

from pathlib import Path

from siirl_dask.config import Backend, Config
from siirl_dask.errors import ConfigError
from siirl_dask.planner import Plan
from siirl_dask.planner.canonical import function_name
from siirl_dask.planner.contract import bare, options_of

_HAVE_TRAINERS = tuple(f"siirl_dask.training:build_{name}" for name in ("trainer", "reference", "critic"))


def refuse_wrong_layouts(config: Config, plan: Plan) -> None:
    """ConfigError where shards, shared tokens or shared layers do not fill a role's workers, or do not fit the heads of
    its model.

    Of a model that is not on this machine, its workers see the heads when they build the role.
    """
    for role in plan.dag.roles:
        if function_name(bare(role.build)) not in _HAVE_TRAINERS:
            continue
        options = options_of(role.build)
        trainer, path = options.get("trainer", config.trainer), options.get("model", config.model).path
        if trainer.backend is Backend.torch:
            continue
        from siirl_dask.training.shares import check_heads, check_workers  # imports torch and transformers

        try:
            check_workers(trainer, len(plan.placement[role.name]))
            if Path(path).is_dir():
                check_heads(trainer, path)
        except ConfigError as error:
            raise ConfigError(f"role {role.name!r}: {error}") from error
