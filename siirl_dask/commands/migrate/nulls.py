"""Options for which null is another value than to leave them out: their default is none."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

_FALSE_BY_NULL = (
    "actor_rollout_ref.actor.megatron.use_distributed_optimizer",
    "actor_rollout_ref.model.enable_gradient_checkpointing",
    "actor_rollout_ref.model.use_remove_padding",
    "actor_rollout_ref.rollout.do_sample",
    "actor_rollout_ref.rollout.free_cache_engine",
    "algorithm.norm_adv_by_std_in_grpo",
    "critic.megatron.use_distributed_optimizer",
    "critic.model.enable_gradient_checkpointing",
    "data.shuffle",
    "trainer.val_before_train",
)
"""Flags of verl's and siiRL's that are true by default, and that null turns off."""
_VERL = dict.fromkeys(_FALSE_BY_NULL, False)
NULLS: dict[str, Mapping[str, Any]] = {
    "verl": _VERL,
    "siiRL": _VERL,
    "TRL": {
        "gradient_checkpointing": False,
        "max_grad_norm": math.inf,
        "shuffle_dataset": False,
        "use_bias_correction_kl": False,
        "vllm_importance_sampling_clip_max": math.inf,
        "vllm_importance_sampling_correction": False,
    },
}
"""The value that null stands for, by system and option."""


def with_meant(values: Mapping[str, Any], system: str) -> dict[str, Any]:
    """Return options with the value that each null stands for; other nulls stay."""
    meant = NULLS[system]
    return {name: meant.get(name) if value is None else value for name, value in values.items()}
