"""Rules of the algorithm: estimator, loss, divergence, and the DAG that they need."""

from __future__ import annotations

from typing import Any

from siirl_dask.commands.migrate.correction_rules import is_bypassed, set_correction
from siirl_dask.commands.migrate.draft import Draft
from siirl_dask.errors import counted

ACTOR = "actor_rollout_ref.actor"
_OURS = "siirl_dask.algorithms"
_ESTIMATORS = {
    "grpo": "grpo",
    "grpo_vectorized": "grpo",
    "cpgd": "grpo",
    "rloo": "rloo",
    "rloo_vectorized": "rloo",
    "opo": "opo",
    "gpg": "gpg",
    "gdpo": "gdpo",
    "remax": "remax",
    "grpo_passk": "pass_at_k",
    "gae": "gae",
    "reinforce_plus_plus": "reinforce_plus_plus",
    "reinforce_plus_plus_baseline": "reinforce_plus_plus_baseline",
    "optimal_token_baseline": "optimal_token_baseline",
    "tir_optimal_token_baseline": "optimal_token_baseline",
}
"""Their estimators, and our advantages."""
_LOSSES = {
    "vanilla": "ppo_clip",
    "gspo": "gspo",
    "geo_mean": "gmpo",
    "sapo": "sapo",
    "cispo": "cispo",
    "gpg": "policy_gradient",
    "dro": "dro",
    "dppo_tv": "dppo",
    "dppo_kl": "dppo",
    "clip_cov": "clip_cov",
    "kl_cov": "kl_cov",
    "bypass_mode": "ppo_clip",
}
"""Their ``loss_mode``, and our losses."""
_MODES = {
    "token-mean": "token_mean",
    "seq-mean-token-sum": "sequence_mean_token_sum",
    "seq-mean-token-mean": "sequence_mean_token_mean",
    "seq-mean-token-sum-norm": "sequence_mean_token_sum_norm",
}
_BY_ROWS = {"siiRL": ("gspo", "gmpo", "sapo"), "verl": ("gmpo", "sapo")}
"""Losses of ours that a system averages by rows whatever ``loss_agg_mode`` says; verl before 0.9
did so with gspo as well."""
_KL = {
    "kl": "k1",
    "k1": "k1",
    "abs": "abs_difference",
    "mse": "k2",
    "k2": "k2",
    "low_var_kl": "k3_clipped",
    "k3": "k3_clipped",
}


def set_algorithm(draft: Draft) -> None:
    """Set the advantage, and the DAG that the estimator, dynamic sampling and a reference need."""
    name = "algorithm.adv_estimator"
    theirs = draft.text(name, "gae").lower().rpartition(".")[2]
    ours = _ESTIMATORS.get(theirs, "grpo")
    base = "dags/grpo.yaml"
    if ours == "gae":
        base = "dags/ppo.yaml"
    draft.bases.append(base)
    by_std = draft.flag("algorithm.norm_adv_by_std_in_grpo", default=True)
    if theirs in ("grpo_vectorized", "gdpo"):
        by_std = True
        draft.hold(
            "algorithm.norm_adv_by_std_in_grpo",
            f"{theirs} divides by the standard deviation whatever this says",
        )
    options: dict[str, Any] = {}
    match ours:
        case "grpo":
            ours = "dr_grpo"
            if by_std:
                ours = "grpo"
                options = {"scale": "group", "epsilon": 1e-6}
            if theirs != "grpo_vectorized":
                draft.became("algorithm.norm_adv_by_std_in_grpo", "algorithm.advantage")
        case "pass_at_k":
            options = {"divide_by_std": by_std}
            draft.became("algorithm.norm_adv_by_std_in_grpo", "algorithm.advantage_options")
        case "gae":
            options = {
                "discount": draft.number("algorithm.gamma", 1.0),
                "gae_lambda": draft.number("algorithm.lam", 1.0),
            }
            draft.became("algorithm.lam", "algorithm.advantage_options")
            draft.became("algorithm.gamma", "algorithm.advantage_options")
        case "reinforce_plus_plus" | "reinforce_plus_plus_baseline":
            draft.nodes["advantage"] = {"run": "siirl_dask.nodes:estimate_token_advantages"}
            if ours == "reinforce_plus_plus":
                options = {"discount": draft.number("algorithm.gamma", 1.0)}
                draft.became("algorithm.gamma", "algorithm.advantage_options")
        case "optimal_token_baseline":
            draft.nodes["old_logprobs"] = {"with": {"collision_probs": True}}
            draft.nodes["advantage"] = {
                "run": "siirl_dask.nodes:estimate_token_advantages",
                "with": {"whiten": False, "probabilities": True},
            }
            draft.became(f"{ACTOR}.calculate_sum_pi_squared", "nodes.old_logprobs")
        case "remax":
            _add_greedy(draft)
        case "gdpo":
            options = _gdpo_options(draft)
    draft.set("algorithm.advantage", f"{_OURS}:{ours}", name)
    draft.set("algorithm.advantage_options", options, note=f"of {ours}, written out")
    if theirs not in _ESTIMATORS:
        reason = f"there is no advantage {theirs!r}: docs/algorithms.md has those that there are"
        draft.leave_out(name, reason, ["algorithm.advantage"])
    _set_dynamic_sampling(draft)
    _set_reference(draft)


def _gdpo_options(draft: Draft) -> dict[str, Any]:
    """Return the options of gdpo, and have the node hand it the kinds of reward."""
    keys = "algorithm.gdpo_reward_keys"
    weights = "algorithm.gdpo_reward_weights"
    kinds = [str(kind) for kind in draft.items(keys)]
    options: dict[str, Any] = {"divide_by_std": True}
    draft.nodes["advantage"] = {"with": {"parts": kinds or ["TO_DECIDE"]}}
    if not kinds:
        draft.open_questions.append(
            "nodes.advantage.with.parts: the parts of the reward that gdpo compares"
        )
    draft.became(keys, "nodes.advantage")
    try:
        numbers = [float(weight) for weight in draft.items(weights)]
    except (TypeError, ValueError):
        draft.lose(weights, "expected a list of numbers; each kind has 1")
        return options
    if numbers and len(numbers) != len(kinds):
        draft.lose(
            weights,
            f"{counted(len(numbers), 'weight')} for {counted(len(kinds), 'kind')} of reward; each kind has 1",
        )
    elif numbers:
        options["weights"] = dict(zip(kinds, numbers, strict=True))
        draft.became(weights, "algorithm.advantage_options")
    return options


def _add_greedy(draft: Draft) -> None:
    draft.nodes |= {
        "rollout": {"run": "siirl_dask.nodes:generate_with_greedy"},
        "baselines": {
            "run": "siirl_dask.nodes:take_greedy_baselines", "role": "reward", "after": "reward", "rows": "grouped",
        },
        "old_logprobs": {"after": "baselines"},
        "advantage": {"after": ["baselines", "old_logprobs"]},
    }  # fmt: skip


def _set_dynamic_sampling(draft: Draft) -> None:
    prefix = "algorithm.filter_groups"
    if not draft.flag(f"{prefix}.enable", default=False):
        return
    if "dags/ppo.yaml" in draft.bases:
        draft.lose(
            f"{prefix}.enable",
            "with a critic there is nothing to filter: groups have no say in the advantage",
        )
        return
    draft.bases[:] = [
        "dags/dapo.yaml" if base == "dags/grpo.yaml" else base for base in draft.bases
    ]
    rounds = int(draft.number(f"{prefix}.max_num_gen_batches", 10))
    draft.nodes["rollout"] = {"with": {"rounds": rounds or 10}}
    # the DAG's penalty of long responses, unless asked for
    draft.nodes.setdefault("reward", {"with": {"factor": 0.0}})
    for name in (f"{prefix}.enable", f"{prefix}.max_num_gen_batches"):
        draft.became(name, "nodes.rollout")
    metric = draft.text(f"{prefix}.metric", "acc")
    draft.hold_or_lose(
        f"{prefix}.metric",
        "groups whose rewards are all equal are replaced, by reward",
        holds=metric in ("acc", "score", "reward", "seq_reward", "seq_final_reward"),
    )


def _set_reference(draft: Draft) -> None:
    """Add the reference where a divergence from it is asked for, in the loss or in the reward."""
    in_loss = draft.flag(f"{ACTOR}.use_kl_loss", default=False)
    in_reward = draft.flag("algorithm.use_kl_in_reward", default=False)
    coefficient: float = 0
    if in_loss:
        coefficient = draft.number(f"{ACTOR}.kl_loss_coef", 0.001)
    draft.set(
        "algorithm.kl_coefficient", coefficient, f"{ACTOR}.kl_loss_coef", f"{ACTOR}.use_kl_loss"
    )
    kind = draft.text(f"{ACTOR}.kl_loss_type", "low_var_kl")
    if in_loss:
        plain = _KL.get(kind.rstrip("+"))
        estimate = "k3_clipped"
        if plain is not None:
            estimate = plain
        if kind.endswith("+") and estimate != "k2":  # k2 has this gradient itself
            estimate = "straight_through"
        draft.set("algorithm.kl", f"{_OURS}:{estimate}", f"{ACTOR}.kl_loss_type")
        if plain is None:
            reason = f"there is no estimator {kind!r}"
            draft.leave_out(f"{ACTOR}.kl_loss_type", reason, ["algorithm.kl"])
    draft.hold(f"{ACTOR}.kl_loss_type", "no divergence is in the loss")
    draft.hold("algorithm.use_kl_in_reward", "no divergence is in the reward")
    if not (in_loss or in_reward):
        return
    draft.bases[:] = [
        *(base for base in draft.bases if base != "dags/grpo.yaml"),
        "dags/grpo_kl.yaml",
    ]
    after = ["reward", "old_logprobs"]
    if "baselines" in draft.nodes:
        after = ["baselines", "old_logprobs"]
        draft.nodes["reference_logprobs"] = {"after": "baselines"}
    if "dags/ppo.yaml" in draft.bases:
        after.append("values")
    change = {"after": [*after, "reference_logprobs"]}
    if in_reward:
        change = {"after": [*[one for one in after if one != "old_logprobs"], "kl"]}
        _add_controller(draft)
    if in_reward or after != ["reward", "old_logprobs"]:
        draft.nodes["advantage"] = draft.nodes.get("advantage", {}) | change


def _add_controller(draft: Draft) -> None:
    prefix = "algorithm.kl_ctrl"
    options: dict[str, Any] = {"coefficient": draft.number(f"{prefix}.kl_coef", 0.001)}
    if draft.text(f"{prefix}.type", "fixed") == "adaptive":
        options |= {
            "target": draft.number(f"{prefix}.target_kl", 0.1),
            "horizon": draft.number(f"{prefix}.horizon", 10000),
        }
    draft.roles["kl"] = {"build": f"{_OURS}:build_kl_controller", "with": options}
    theirs = draft.text("algorithm.kl_penalty", "kl").rstrip("+")
    kind = _KL.get(theirs, "k1")
    if theirs not in _KL:
        draft.leave_out(
            "algorithm.kl_penalty", f"there is no estimator {theirs!r}", ["algorithm.advantage"]
        )
    draft.nodes["kl"] = {
        "run": "siirl_dask.nodes:penalise_kl",
        "role": "kl",
        "after": ["old_logprobs", "reference_logprobs"],
        "with": {"kl": f"{_OURS}:{kind}"},
    }
    for name in (
        "use_kl_in_reward",
        "kl_penalty",
        *(f"kl_ctrl.{one}" for one in ("type", "kl_coef", "target_kl", "horizon")),
    ):
        draft.became(f"algorithm.{name}", "roles.kl", "nodes.kl")


def set_loss(draft: Draft) -> None:
    """Set the loss with its bounds, and the way in which tokens are averaged."""
    mode_name = f"{ACTOR}.policy_loss.loss_mode"
    bypass = is_bypassed(draft)
    mode = draft.text(mode_name, "vanilla").replace("-", "_")
    note = ""
    if bypass:
        mode = "bypass_mode"
        note = "bypass_mode has a loss of its own, whatever loss_mode says"
    ours = _LOSSES.get(mode, "ppo_clip")
    if (
        draft.flag(f"{ACTOR}.use_cpgd_loss", default=False)
        or draft.text("algorithm.adv_estimator") == "cpgd"
    ):
        ours = "cpgd"
    options = _loss_options(draft, ours)

    draft.set("algorithm.loss", f"{_OURS}:{ours}", mode_name, f"{ACTOR}.use_cpgd_loss", note=note)
    if mode not in _LOSSES:
        reason = f"there is no loss {mode!r}: docs/algorithms.md has those that there are"
        draft.leave_out(mode_name, reason, ["algorithm.loss"])
    names = (
        "clip_ratio_low",
        "clip_ratio_high",
        "clip_ratio",
        "clip_ratio_c",
        "tau_pos",
        "tau_neg",
        "policy_drift_coeff",
    )
    draft.set("algorithm.loss_options", options, *(f"{ACTOR}.{name}" for name in names))
    if ours == "dro":
        draft.became(f"{ACTOR}.policy_loss.dro_beta", "algorithm.loss_options")
    _set_covariant(draft, ours)
    _set_aggregation(draft, ours)
    draft.copy({f"{ACTOR}.entropy_coeff": "algorithm.entropy_coefficient"})
    set_correction(draft)


def _loss_options(draft: Draft, ours: str) -> dict[str, Any]:
    both = draft.number(f"{ACTOR}.clip_ratio", 0.2)
    bounds = {
        "clip_low": draft.number(f"{ACTOR}.clip_ratio_low", both),
        "clip_high": draft.number(f"{ACTOR}.clip_ratio_high", both),
    }
    match ours:
        case "policy_gradient":
            return {}
        case "sapo":
            return {
                "tau_positive": draft.number(f"{ACTOR}.tau_pos", 1.0),
                "tau_negative": draft.number(f"{ACTOR}.tau_neg", 1.05),
            }
        case "ppo_clip":
            return bounds | {"dual_clip": draft.number(f"{ACTOR}.clip_ratio_c", 3.0)}
        case "dro":
            beta = draft.number(f"{ACTOR}.policy_loss.dro_beta", 0.0)
            if not beta > 0:
                draft.open_questions.append(
                    "algorithm.loss_options.beta: verl asks for a dro_beta above 0, and 1 stands in"
                )
                beta = 1.0
            return {"beta": beta}
        case "dppo":
            mode = draft.text(f"{ACTOR}.policy_loss.loss_mode")
            return {
                "low": bounds["clip_low"],
                "high": bounds["clip_high"],
                "divergence": "kl" if mode.endswith("kl") else "tv",
                "cap": draft.number(f"{ACTOR}.clip_ratio_c", 3.0),
            }
        case "cpgd":
            return bounds | {"drift": draft.number(f"{ACTOR}.policy_drift_coeff", 0.0)}
        case "kl_cov":
            return {"coefficient": draft.number(f"{ACTOR}.policy_loss.ppo_kl_coef", 0.1)}
    return bounds


def _set_covariant(draft: Draft, ours: str) -> None:
    """Add the node that chooses tokens, for Clip-Cov and KL-Cov."""
    prefix = f"{ACTOR}.policy_loss"
    if ours not in ("clip_cov", "kl_cov"):
        return
    options: dict[str, Any] = {
        "minibatches": "${algorithm.minibatches}",
        "fraction": draft.number(f"{prefix}.{ours}_ratio", 0.0002),
    }
    names = [f"{prefix}.{ours}_ratio"]
    if ours == "clip_cov":
        options |= {
            "low": draft.number(f"{prefix}.clip_cov_lb", 1.0),
            "high": draft.number(f"{prefix}.clip_cov_ub", 5.0),
        }
        names += [f"{prefix}.clip_cov_lb", f"{prefix}.clip_cov_ub"]
    draft.nodes["covariant"] = {
        "run": "siirl_dask.nodes:choose_covariant", "role": "policy", "after": "minibatches", "with": options,
    }  # fmt: skip
    draft.nodes["update"] = {"after": "covariant", "with": {"columns": ["covariant"]}}
    for name in names:
        draft.became(name, "nodes.covariant")
    draft.became(f"{prefix}.ppo_kl_coef", "algorithm.loss_options")


def _set_aggregation(draft: Draft, ours: str) -> None:
    name = f"{ACTOR}.loss_agg_mode"
    asked = agg_mode(draft)
    mode = asked
    note = ""
    if ours in _BY_ROWS[draft.given.system]:
        mode = "seq-mean-token-mean"
        note = f"always so with {ours}"
    function, options = aggregation(draft, mode, f"{ACTOR}.loss_scale_factor")
    draft.set(
        "algorithm.aggregation",
        f"{_OURS}:{function}",
        name,
        f"{ACTOR}.use_token_level_loss",
        note=note,
    )
    if options:
        draft.set("algorithm.aggregation_options", options, f"{ACTOR}.loss_scale_factor", name)
    if mode not in _MODES:
        draft.leave_out(name, f"there is no aggregation {mode!r}", ["algorithm.aggregation"])
    terms = draft.entries["algorithm.kl_coefficient"].value
    if asked != mode and (terms or draft.number(f"{ACTOR}.entropy_coeff", 0.0)):
        draft.open_questions.append(
            f"algorithm.aggregation: with {ours} KL and entropy are averaged as loss_agg_mode="
            f"{asked} says there, and here as the loss is: by {function}"
        )


def agg_mode(draft: Draft) -> str:
    """Return the policy's ``loss_agg_mode``, by either of its names."""
    default = "token-mean"
    if not draft.flag(f"{ACTOR}.use_token_level_loss", default=True):
        default = "seq-mean-token-mean"
    return draft.text(f"{ACTOR}.loss_agg_mode", default)


def aggregation(draft: Draft, mode: str, scale: str) -> tuple[str, dict[str, Any]]:
    """Return the aggregation of ours that a ``loss_agg_mode`` is, and its options; ``scale`` is the
    option of its fixed length.
    """
    function = _MODES.get(mode, "token_mean")
    if function != "sequence_mean_token_sum_norm":
        return function, {}
    length = draft.number(scale, draft.number("data.max_response_length", 512))
    return function, {"length": int(length)}
