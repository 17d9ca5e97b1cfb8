"""Checks of ``rollout.window`` and ``rollout.ledger`` against the rest of a configuration."""

from __future__ import annotations

from siirl_dask.config.checks import located
from siirl_dask.config.rollout import RolloutConfig
from siirl_dask.errors import ConfigError


def check_window(rollout: RolloutConfig, batch_size: int, minibatches: int) -> None:
    """Raise ConfigError for a window that leaves a step too few groups, and for keys that cannot
    be combined with it.

    ``batch_size`` are the prompts of a step, ``minibatches`` the parts in which it is trained. A
    local ``rollout.ledger`` becomes an absolute path: workers may run in another folder.
    """
    if not rollout.window:
        if rollout.ledger is not None:
            raise ConfigError(
                f"rollout.ledger={rollout.ledger!r} with rollout.window=0: a step waits for all of "
                "its groups, so there is no choice to repeat; give the rollout.window of the run "
                "that wrote the table, or leave rollout.ledger out"
            )
        return
    if rollout.partial:
        raise ConfigError(
            f"rollout.window={rollout.window} with rollout.partial=true: one of them decides where "
            "a row stops, the first groups that are whole or a number of tokens; leave one of them "
            "out"
        )
    if rollout.in_flight and rollout.ledger is not None:
        raise ConfigError(
            f"rollout.ledger={rollout.ledger!r} with rollout.in_flight=true: a ledger has the "
            "groups of a step, and not the time at which weights were loaded, so that other rows "
            "would be made; leave one of them out"
        )
    most = batch_size - minibatches
    if rollout.window > most:
        raise ConfigError(
            f"rollout.window={rollout.window}: expected at most {most}, so that the first step, "
            "which leaves as many of its prompts to the next one, has one for each mini-batch "
            f"(data.batch_size={batch_size}, algorithm.minibatches={minibatches})"
        )
    if rollout.ledger is not None:
        rollout.ledger = located("rollout.ledger", rollout.ledger)
