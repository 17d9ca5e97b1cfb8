"""Rules of TRL's losses, advantages and references."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from siirl_dask.commands.migrate.draft import Draft

_OURS = "siirl_dask.algorithms"
_CORRECTION = "algorithm.correction"
_CORRECTION_OPTIONS = "algorithm.correction_options"
_AGGREGATIONS = {
    "grpo": "sequence_mean_token_mean",
    "sapo": "sequence_mean_token_mean",
    "dapo": "token_mean",
    "bnpo": "token_mean",
    "cispo": "token_mean",
    "vespo": "token_mean",
    "luspo": "sequence_mean_token_sum",
    "dr_grpo": "sequence_mean_token_sum_norm",
}
"""Kinds of loss, and the aggregation of each, as docs/benchmarks/trl.md compares them."""
_GATES = {
    "vespo_k_pos": ("power_positive", 2.0),
    "vespo_lambda_pos": ("decay_positive", 3.0),
    "vespo_k_neg": ("power_negative", 3.0),
    "vespo_lambda_neg": ("decay_negative", 2.0),
}
"""Options of vespo there, with ours and the default of each."""


def set_trl_algorithm(draft: Draft) -> None:
    """Set the advantage, the loss, the divergence, and the DAG that they need."""
    beta = draft.number("beta", 0.0)
    follows = draft.flag("sync_ref_model", default=False)
    base = "dags/grpo.yaml"
    if beta:
        base = "dags/grpo_average.yaml" if follows else "dags/grpo_kl.yaml"
    draft.bases.append(base)
    scale = str(draft.value("scale_rewards", "group")).lower()
    if scale in ("none", "false"):
        draft.set("algorithm.advantage", f"{_OURS}:dr_grpo", "scale_rewards")
    else:
        draft.set("algorithm.advantage", f"{_OURS}:grpo", "scale_rewards")
        options = {"epsilon": 1e-4} | ({"scale": "batch"} if scale == "batch" else {})
        draft.set("algorithm.advantage_options", options, "scale_rewards", note="TRL's epsilon")
    _set_loss(draft)
    draft.set("algorithm.kl_coefficient", beta, "beta")
    corrected = "use_bias_correction_kl"
    if beta:
        draft.set("algorithm.kl", f"{_OURS}:k3", note="TRL's estimate")
        draft.set("algorithm.kl_bias_correction", draft.flag(corrected, default=True), corrected)
    draft.hold(corrected, "there is no divergence without beta")
    draft.set("algorithm.entropy_coefficient", draft.number("entropy_coef", 0.0), "entropy_coef")
    synced = ("ref_model_sync_steps", "ref_model_mixup_alpha")
    if follows and beta:
        draft.set("trainer.ema_every", draft.whole(synced[0], 512), synced[0], "sync_ref_model")
        kept = round(1 - draft.number(synced[1], 0.6), 6)
        draft.set("trainer.ema_decay", kept, synced[1], "sync_ref_model", note="1 - alpha")
    for name in ("sync_ref_model", *synced):
        draft.hold(name, "the reference is the policy as training began, or there is none")
    _set_mask(draft, beta)
    _set_stale_rows(draft)
    _set_high_entropy(draft)


def _set_stale_rows(draft: Draft) -> None:
    """Leave failures out that the policy is far from, which are of the sampler's log-probs there
    as well.
    """
    name = "off_policy_mask_threshold"
    limit = draft.number(name, 0.0)
    if not draft.has(name):
        return
    if limit <= 0:
        draft.lose(name, f"{draft.text(name)}: expected more than 0 nats a token")
        return
    _weigh(draft, "mask_off_policy", {"limit": limit}, name)


def _set_high_entropy(draft: Draft) -> None:
    """Leave all tokens out but those at which the policy is least certain."""
    name = "top_entropy_quantile"
    fraction = draft.number(name, 1.0)
    if not 0 < fraction < 1:
        draft.hold(name, "all tokens count")
        return
    draft.nodes["old_logprobs"] = {"with": {"entropies": True}}
    draft.nodes["forks"] = {
        "run": "siirl_dask.nodes:choose_high_entropy",
        "role": "policy",
        "after": "minibatches",
        "with": {"minibatches": "${algorithm.minibatches}", "fraction": fraction},
    }
    draft.nodes["update"] = {"after": "forks", "with": {"columns": ["high_entropy"]}}
    draft.became(name, "nodes.forks")
    _weigh(draft, "keep_high_entropy", {}, name)


def _weigh(draft: Draft, name: str, options: Mapping[str, Any], source: str) -> None:
    """Multiply the loss of each token by one more weight of ours."""
    own = draft.entries.get(_CORRECTION)
    if own is None:
        draft.set(_CORRECTION, f"{_OURS}:{name}", source)
        draft.set(_CORRECTION_OPTIONS, dict(options), source)
        return
    earlier = draft.entries[_CORRECTION_OPTIONS].value
    combined = f"{_OURS}:combined"
    parts = [{"run": own.value, "with": earlier}]
    if own.value == combined:
        parts = list(earlier["parts"])
    parts.append({"run": f"{_OURS}:{name}", "with": dict(options)})
    sources = (*own.sources, source)
    draft.set_from(_CORRECTION, combined, sources)
    draft.set_from(_CORRECTION_OPTIONS, {"parts": parts}, sources)


def _set_mask(draft: Draft, beta: float) -> None:
    name = "mask_truncated_completions"
    if not draft.flag(name, default=False):
        draft.hold(name, "the default here")
        return
    draft.nodes["masked"] = {
        "run": "siirl_dask.nodes:mask_truncated",
        "role": "reward",
        "after": "reward",
        "rows": "grouped",
        "with": {"reasons": ["length"]},
    }
    after = ["masked", "old_logprobs", *(["reference_logprobs"] if beta else [])]
    draft.nodes["advantage"] = {"after": after}
    draft.became(name, "nodes.masked")


def _set_loss(draft: Draft) -> None:
    kind = draft.text("loss_type", "dapo")
    level = draft.text("importance_sampling_level", "token")
    low = draft.number("epsilon", 0.2)
    high = draft.number("epsilon_high", low)
    levels = ("sequence",) if kind == "luspo" else ("token", "sequence")
    if kind not in _AGGREGATIONS or level not in levels:
        name = "loss_type" if kind not in _AGGREGATIONS else "importance_sampling_level"
        reason = (
            f"there is no loss {draft.text(name)!r}: docs/algorithms.md has those that there are"
        )
        draft.lose(name, reason)
        draft.leave_open("algorithm.loss", f"{name}={draft.text(name)} has no counterpart")
        return
    names: tuple[str, ...] = ("epsilon", "epsilon_high", "delta")
    options: dict[str, Any] = {"clip_low": low, "clip_high": high}
    loss = "ppo_clip"
    if kind == "cispo":
        loss = "cispo"
        options = {"clip_low": 1.0, "clip_high": high}
        draft.hold("epsilon", "cispo has an upper bound alone")
    elif kind == "sapo":
        loss = "sapo"
        names = ("sapo_temperature_pos", "sapo_temperature_neg", "delta")
        options = {
            "tau_positive": draft.number("sapo_temperature_pos", 1.0),
            "tau_negative": draft.number("sapo_temperature_neg", 1.05),
        }
    elif kind == "vespo":
        loss = "vespo"
        names = tuple(_GATES)
        options = {ours: draft.number(name, default) for name, (ours, default) in _GATES.items()}
    elif level == "sequence":
        loss = "gspo"
    elif draft.has("delta"):
        options["dual_clip"] = draft.number("delta", 2.0)
    draft.set("algorithm.loss", f"{_OURS}:{loss}", "loss_type", "importance_sampling_level")
    draft.set_from("algorithm.loss_options", options, names)
    aggregation = _AGGREGATIONS[kind]
    draft.set("algorithm.aggregation", f"{_OURS}:{aggregation}", "loss_type")
    if kind == "dr_grpo":
        length = {"length": "${rollout.max_response_length}"}
        draft.set("algorithm.aggregation_options", length, "loss_type")
    for name in (
        "epsilon",
        "epsilon_high",
        "delta",
        "sapo_temperature_pos",
        "sapo_temperature_neg",
        *_GATES,
    ):
        draft.hold(name, f"not read by {loss}")
    if kind == "dapo" and draft.entries["algorithm.minibatches"].value > 1:
        draft.open_questions.append(
            "algorithm.aggregation: TRL divides a mini-batch by the tokens of the step over the "
            "number of mini-batches, and token_mean by its own (docs/benchmarks/trl.md)"
        )
