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
_SYNCED = ("sync_ref_model", "ref_model_sync_steps", "ref_model_mixup_alpha")


def set_trl_algorithm(draft: Draft) -> None:
    """Set the advantage, the loss, the divergence, and the DAG that they need."""
    beta = draft.number("beta", 0.0)
    base = "dags/grpo.yaml"
    if beta:
        base = "dags/grpo_kl.yaml"
        if _set_average(draft):
            base = "dags/grpo_average.yaml"
    draft.bases.append(base)
    _set_advantage(draft)
    _set_loss(draft)
    draft.set("algorithm.kl_coefficient", beta, "beta")
    corrected = "use_bias_correction_kl"
    if beta:
        draft.set("algorithm.kl", f"{_OURS}:k3", note="TRL's estimate")
        draft.set("algorithm.kl_bias_correction", draft.flag(corrected, default=True), corrected)
    draft.hold(corrected, "there is no divergence without beta")
    draft.set("algorithm.entropy_coefficient", draft.number("entropy_coef", 0.0), "entropy_coef")
    for name in _SYNCED:
        draft.hold(name, "the reference is the policy as training began, or there is none")
    _set_mask(draft, beta)
    _set_stale_rows(draft)
    _set_high_entropy(draft)


def _set_average(draft: Draft) -> bool:
    """Have the reference follow the policy where TRL's does; return whether it does."""
    flag, steps, alpha = _SYNCED
    share = draft.number(alpha, 0.6)
    if not draft.flag(flag, default=False) or share == 0:
        return False
    if not 0 < share <= 1:
        reason = f"{share}: expected a share of the policy's weights, up to 1"
        draft.lose(alpha, reason)
        draft.ask(f"trainer.ema_decay: {alpha}={reason}; 0.6 stands in")
        share = 0.6
    every = draft.whole(steps, 512)
    if share == 1 and every == 1:
        # each optimizer step makes the reference the policy, of which no copy is needed
        draft.nodes["reference_logprobs"] = {"run": "siirl_dask.nodes:reference_logprobs"}
        for name in _SYNCED:
            draft.became(name, "nodes.reference_logprobs")
        return True
    draft.set("trainer.ema_every", every, steps, flag)
    draft.set("trainer.ema_decay", round(1 - share, 6), alpha, flag, note="1 - alpha")
    return True


def _set_advantage(draft: Draft) -> None:
    key = "algorithm.advantage"
    together = "multi_objective_aggregation"
    how = draft.text(together, "sum_then_normalize")
    if how == "normalize_then_sum":
        names = [str(one).rpartition(":")[2] for one in draft.items("reward_funcs")]
        if names and len({*names, "reward"}) == len(names) + 1:
            _set_gdpo(draft, names, together)
            return
        draft.lose(together, "give the functions names of their own: gdpo compares parts by name")
    elif how == "sum_then_normalize":
        draft.hold(together, "rewards are added up before they are compared")
    else:
        draft.lose(together, f"there is no {how!r}: sum_then_normalize or normalize_then_sum")
    scale = str(draft.value("scale_rewards", "group")).lower()
    if scale in ("none", "false"):
        draft.set(key, f"{_OURS}:dr_grpo", "scale_rewards")
        return
    draft.set(key, f"{_OURS}:grpo", "scale_rewards")
    options: dict[str, Any] = {"epsilon": 1e-4}
    if scale == "batch":
        options["scale"] = scale
    draft.set("algorithm.advantage_options", options, "scale_rewards", note="TRL's epsilon")


def _set_gdpo(draft: Draft, names: list[str], source: str) -> None:
    """Compare the rewards of each function by itself, and then their weighted sums."""
    draft.set("algorithm.advantage", f"{_OURS}:gdpo", source)
    options: dict[str, Any] = {"epsilon": 1e-4}
    weights = draft.items("reward_weights")
    if len(weights) == len(names):
        options["weights"] = dict(zip(names, weights, strict=True))
    draft.set("algorithm.advantage_options", options, source, note="TRL's epsilon")
    draft.nodes["advantage"] = {"with": {"parts": names}}
    draft.became(source, "nodes.advantage")
    draft.hold("scale_rewards", "not read with normalize_then_sum")


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
    if fraction <= 0:
        draft.lose(name, f"{draft.text(name)} keeps one token: give a share of them above 0")
        return
    if fraction >= 1:
        draft.hold(name, "all tokens count")
        return
    if draft.number("entropy_coef", 0.0):
        draft.open_questions.append(
            "algorithm.entropy_coefficient: TRL's bonus is of the tokens of high entropy alone, "
            "and here of all"
        )
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
    after = ["masked", "old_logprobs"]
    if beta:
        after.append("reference_logprobs")
    draft.nodes["advantage"] = draft.nodes.get("advantage", {}) | {"after": after}
    draft.became(name, "nodes.masked")


_LEVELS = {
    "luspo": ("sequence",),
    "cispo": ("token",),
    "sapo": ("token",),
}
"""Levels of the ratio that a kind of loss has here, where it has not both."""
_OVER_STEP = ("dapo", "cispo", "vespo")
"""Kinds of loss that are divided by a share of the whole step's tokens."""


def _set_loss(draft: Draft) -> None:
    kind = draft.text("loss_type", "dapo")
    level = draft.text("importance_sampling_level", "token")
    refused = ""
    if kind not in _AGGREGATIONS:
        refused = "loss_type"
    elif level not in _LEVELS.get(kind, ("token", "sequence")):
        refused = "importance_sampling_level"
    if refused:
        asked = f"loss_type={kind}"
        if refused != "loss_type":
            asked += f", importance_sampling_level={level}"
        draft.lose(
            refused, f"there is no loss {asked}: docs/algorithms.md has those that there are"
        )
        draft.leave_open("algorithm.loss", f"{asked} has no counterpart")
        return
    loss = "ppo_clip"
    if kind in ("cispo", "sapo", "vespo"):
        loss = kind
    if loss == "ppo_clip" and level == "sequence":
        loss = "gspo"
    draft.set("algorithm.loss", f"{_OURS}:{loss}", "loss_type", "importance_sampling_level")
    names, options = _loss_options(draft, loss)
    draft.set_from("algorithm.loss_options", options, names)
    if loss == "cispo" and options["clip_high"] < 0:
        draft.leave_open(
            "algorithm.loss_options",
            "TRL's cispo bounds the weight by epsilon_high itself, which is below 1 here: give one "
            "above 1, such as 5.0, whose options are {clip_low: 1.0, clip_high: 4.0}",
        )
    for name in ("epsilon", "epsilon_high", "delta", *_TEMPERATURES, *_GATES):
        draft.hold(name, f"not read by {loss}")
    if loss == "gspo":
        _ask_about_rows(draft)
    _set_aggregation(draft, kind)


def _ask_about_rows(draft: Draft) -> None:
    """Name what TRL's ratio of a row does that ``gspo`` does not."""
    draft.leave_out("delta", "gspo has no dual clip", ["algorithm.loss_options"])
    if draft.number("beta", 0.0) and draft.flag("use_bias_correction_kl", default=True):
        draft.open_questions.append(
            "algorithm.kl_bias_correction: TRL multiplies each token's KL by the row's ratio, and "
            "here by the token's own"
        )
    mode = draft.text("vllm_importance_sampling_mode", "sequence_mask")
    if not draft.flag("use_vllm", default=False):
        mode = ""
    if mode.startswith("token") or draft.number("top_entropy_quantile", 1.0) < 1:
        draft.open_questions.append(
            "algorithm.correction: weights of tokens weigh each token's own gradient of the row's "
            "ratio here, and in TRL all its tokens' alike"
        )


_TEMPERATURES = {
    "sapo_temperature_pos": ("tau_positive", 1.0),
    "sapo_temperature_neg": ("tau_negative", 1.05),
}
"""Options of sapo there, with ours and the default of each."""


def _loss_options(draft: Draft, loss: str) -> tuple[tuple[str, ...], dict[str, Any]]:
    """Return the options of a loss of ours, after the names of TRL's that they come from."""
    low = draft.number("epsilon", 0.2)
    high = draft.number("epsilon_high", low)
    match loss:
        case "cispo":
            # TRL bounds the weight by epsilon_high, not by 1 + epsilon_high
            return ("epsilon_high",), {"clip_low": 1.0, "clip_high": round(high - 1, 6)}
        case "sapo" | "vespo":
            table = _TEMPERATURES
            if loss == "vespo":
                table = _GATES
            options = {ours: draft.number(name, default) for name, (ours, default) in table.items()}
            return tuple(table), options
    clip = {"clip_low": low, "clip_high": high}
    if loss == "gspo" or not draft.has("delta"):
        return ("epsilon", "epsilon_high"), clip
    delta = draft.number("delta", 2.0)
    if delta >= 1 + high:
        clip["dual_clip"] = delta
    else:
        # TRL takes the minimum after both clips: below 1 + epsilon_high its delta is the upper clip
        # of A > 0, and epsilon_high bounds the loss of A < 0
        clip["clip_high"] = round(delta - 1, 6)
        clip["dual_clip"] = 1 + high
    if not (clip["dual_clip"] > 1 and clip["clip_high"] >= 0):
        draft.lose("delta", f"{delta}: expected more than 1")
        clip = {"clip_low": low, "clip_high": high}
    return ("epsilon", "epsilon_high", "delta"), clip


def _set_aggregation(draft: Draft, kind: str) -> None:
    """Set the aggregation, and ask about what TRL averages otherwise than the loss."""
    key = "algorithm.aggregation"
    aggregation = _AGGREGATIONS[kind]
    draft.set(key, f"{_OURS}:{aggregation}", "loss_type")
    if kind == "dr_grpo":
        length = {"length": "${rollout.max_response_length}"}
        draft.set("algorithm.aggregation_options", length, "loss_type")
    if kind in _OVER_STEP and draft.entries["algorithm.minibatches"].value > 1:
        draft.open_questions.append(
            f"{key}: TRL divides a mini-batch by the tokens of the step over the "
            "number of mini-batches, and token_mean by its own (docs/benchmarks/trl.md)"
        )
    if kind == "bnpo" and draft.whole("gradient_accumulation_steps", 1) > 1:
        draft.open_questions.append(
            f"{key}: TRL means the tokens of each micro-batch, then the micro-batches, and "
            "token_mean the tokens of the mini-batch (docs/benchmarks/trl.md)"
        )
    if draft.number("entropy_coef", 0.0) and aggregation != "token_mean":
        draft.open_questions.append(
            f"algorithm.entropy_coefficient: TRL's bonus is a mean over tokens whatever the loss, "
            f"and here {aggregation} averages it with the loss"
        )
    masked = draft.flag("mask_truncated_completions", default=False)
    if masked and aggregation != "token_mean":
        draft.open_questions.append(
            f"{key}: a masked completion counts among TRL's rows, and not among {aggregation}'s"
        )
