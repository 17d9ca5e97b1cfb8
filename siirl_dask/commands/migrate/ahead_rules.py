"""Rules of verl's programs that generate ahead of training, on devices of their own."""

from __future__ import annotations

import math

from siirl_dask.commands.migrate.draft import Draft
from siirl_dask.errors import counted

_REQUIRED = "async_training.require_batches"
_ROUNDS = "async_training.trigger_parameter_sync_step"
_STALENESS = "async_training.staleness_threshold"
_DEVICES = ("nnodes", "n_gpus_per_node")
_TOTAL = "rollout.total_rollout_steps"
_MODE = "trainer.v1.trainer_mode"
_MINI = "actor_rollout_ref.actor.ppo_mini_batch_size"


def update_rounds(draft: Draft) -> int:
    """Return the training steps of theirs between two loads of weights, which are one step here."""
    if draft.given.ahead != "fully_async":
        return 1
    return draft.whole(_ROUNDS, 4)


def prompts_between_loads(draft: Draft) -> int:
    """Return the prompts that the fully asynchronous program trains on between two loads."""
    return update_rounds(draft) * draft.whole(_REQUIRED, 1) * draft.whole(_MINI, 256)


def steps_of_total(draft: Draft, batch: int) -> int | None:
    """Return the steps of a number of prompts that are generated in all; None where it is not
    given.
    """
    if draft.given.ahead != "fully_async" or not draft.has(_TOTAL):
        return None
    return max(1, int(draft.number(_TOTAL, 100)) // batch)


def generating_devices(draft: Draft) -> int:
    """Return the number of devices that generate alone; 0 where all do both."""
    if not draft.given.ahead:
        return 0
    hosts = draft.whole("rollout.nnodes", 1)
    return hosts * draft.whole("rollout.n_gpus_per_node", 8)


def set_ahead(draft: Draft, training: int) -> None:
    """Set how many steps generation runs ahead, and ask for the workers of each role."""
    if draft.text(_MODE, "sync") == "sync":
        draft.hold(_MODE, "generation and training take turns")
    else:
        reason = "generation ahead of training is rollout.max_staleness, in steps"
        draft.leave_out(_MODE, reason, ["rollout.max_staleness"])
    generating = generating_devices(draft)
    if not generating:
        return
    steps = 1
    if draft.given.ahead == "fully_async":
        steps = math.ceil(draft.number(_STALENESS, 0.1))
    note = "steps, where theirs is a share of a step's samples"
    draft.set("rollout.max_staleness", steps, _STALENESS, note=note)
    total = training + generating
    devices = [f"{part}.{one}" for part in ("trainer", "rollout") for one in _DEVICES]
    draft.set_from("cluster.workers", total, devices)
    draft.leave_open(
        "cluster.placement",
        f"{counted(training, 'device')} there train and {generating} generate: write the workers "
        f"of each role, such as {{rollout: [{training}, ..., {total - 1}], reward: [{training}, "
        f"..., {total - 1}], policy: [0, ..., {training - 1}]}}, and critic and reference with the "
        "policy",
    )


BATCH = (_REQUIRED, _ROUNDS)
"""Options that a step's prompts follow from."""
TOTAL = _TOTAL
