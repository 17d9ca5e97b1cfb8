"""Checks that a node continues responses or episodes in later steps where the configuration asks
for it, and that a ledger which is to be repeated is there.
"""

from __future__ import annotations

from siirl_storage import StorageError

from siirl_dask.config import Config
from siirl_dask.errors import ConfigError
from siirl_dask.planner import DAG
from siirl_dask.runs.tables import stored_steps
from siirl_dask.schema import TOKEN_VERSIONS


def check_continued(config: Config, dag: DAG) -> None:
    """Raise ConfigError for ``rollout.partial``, ``rollout.in_flight`` or ``rollout.window`` that
    no node reads, and for a ``rollout.ledger`` without the steps of the run.
    """
    rollout = config.rollout
    written = {name for node in dag.nodes for name in node.contract.writes.names}
    if rollout.partial and TOKEN_VERSIONS not in written:
        raise ConfigError(
            "rollout.partial=true and no node generates in parts: expected "
            "siirl_dask.nodes:generate"
        )
    if rollout.in_flight and not any(node.contract.in_flight for node in dag.nodes):
        raise ConfigError(
            "rollout.in_flight=true and no node takes weights while it generates: expected "
            "siirl_dask.nodes:generate or siirl_dask.nodes:play"
        )
    continued = [node for node in dag.nodes if node.contract.carries is not None]
    if rollout.window and not any(
        TOKEN_VERSIONS in node.contract.writes.names for node in continued
    ):
        raise ConfigError(
            f"rollout.window={rollout.window} and no node takes the first groups that are whole: "
            "expected siirl_dask.nodes:generate or siirl_dask.nodes:play"
        )
    if rollout.ledger is None:
        return
    url, _, table = rollout.ledger.rstrip("/").rpartition("/")
    try:
        steps = stored_steps(url, table)
    except (StorageError, OSError, ValueError) as error:
        raise ConfigError(
            f"rollout.ledger={rollout.ledger!r} cannot be read: {error}; expected the URL of a "
            "table of samples, as in runs/first/rollouts"
        ) from error
    missing = sorted(set(range(1, config.run.steps + 1)) - steps)
    if missing:
        raise ConfigError(
            f"rollout.ledger={rollout.ledger!r} has no step {missing[0]}, and run.steps is "
            f"{config.run.steps}: expected the table of samples of a run that took as many steps, "
            "as in runs/first/rollouts"
        )
