"""Rules of the correction for a sampler that is not quite the policy: verl's
``rollout_correction``, siiRL's cap.
"""

from __future__ import annotations

from typing import Any

from siirl_dask.commands.migrate.draft import Draft
from siirl_dask.config import ENGINES_LOGPROBS
from siirl_dask.errors import counted

_OURS = "siirl_dask.algorithms"
_PREFIX = "algorithm.rollout_correction"
_IS = f"{_PREFIX}.rollout_is"
_IS_THRESHOLD = f"{_PREFIX}.rollout_is_threshold"
_RS = f"{_PREFIX}.rollout_rs"
_RS_THRESHOLD = f"{_PREFIX}.rollout_rs_threshold"
BYPASS_MODE = f"{_PREFIX}.bypass_mode"
_ENGINES_LOGPROBS = (
    "async_training.use_rollout_log_probs",
    "actor_rollout_ref.actor.use_rollout_log_probs",
)
_LOSS_TYPE = f"{_PREFIX}.loss_type"
_CAP = "actor_rollout_ref.actor.tis_imp_ratio_cap"
_OF_ROWS = ("sum", "mean", "max")
_Part = tuple[str, dict[str, Any]]
"""A correction of ours and its options."""


def set_correction(draft: Draft) -> None:
    """Set the weights and masks of tokens, or with ``bypass_mode`` the engine's log-probs in
    their place.
    """
    if draft.flag(f"{_PREFIX}.rollout_is_batch_normalize", default=False):
        draft.leave_out(
            f"{_PREFIX}.rollout_is_batch_normalize",
            "weights are not divided by their mean over the batch",
            ["algorithm.loss" if is_bypassed(draft) else "algorithm.correction"],
        )
    draft.hold(f"{_PREFIX}.rollout_is_batch_normalize", "weights are as they are")
    if is_bypassed(draft):
        _set_bypass(draft)
        return
    draft.hold(BYPASS_MODE, "old log-probs are of a pass of the policy")
    draft.hold(_LOSS_TYPE, "it counts with bypass_mode alone")
    if draft.number(_CAP, -1) > 0:
        _set_parts(draft, [("truncated_is", {"cap": draft.number(_CAP, 2.0)})], [_CAP])
        for name in (_IS, _IS_THRESHOLD, _RS, _RS_THRESHOLD):
            draft.lose(name, "tis_imp_ratio_cap weighs tokens already; leave one of them out")
        return
    draft.hold(_CAP, "no cap")
    parts = [*_weights(draft), *_masks(draft)]
    if _text(draft, _IS) and "token_baseline" in draft.text("algorithm.adv_estimator"):
        draft.open_questions.append(
            f"algorithm.correction: with {_IS} verl's baseline also weighs rows by squared weights, "
            "and optimal_token_baseline does not"
        )
    _set_parts(draft, parts, [_IS, _IS_THRESHOLD, _RS, _RS_THRESHOLD])


def is_bypassed(draft: Draft) -> bool:
    """Return whether the engine's log-probs are the old ones, as verl's programs have it by
    default that generate ahead of training.
    """
    engines = False
    if draft.given.ahead:
        engines = all(draft.flag(name, default=True) for name in _ENGINES_LOGPROBS)
    return draft.flag(BYPASS_MODE, default=engines)


def _set_parts(draft: Draft, parts: list[_Part], sources: list[str]) -> None:
    """Set the correction: one, or the product of several. A fate that is decided already stays."""
    if not parts:
        return
    name, options = parts[0]
    if len(parts) > 1:
        name = "combined"
        options = {"parts": [{"run": f"{_OURS}:{one}", "with": chosen} for one, chosen in parts]}
    used = [
        source for source in sources if not (draft.fate(source).lost or draft.fate(source).note)
    ]
    draft.set_from("algorithm.correction", f"{_OURS}:{name}", used)
    draft.set_from("algorithm.correction_options", options, used)


def _weights(draft: Draft) -> list[_Part]:
    """Return the weights that ``rollout_is`` asks for: an upper bound truncates, two bounds
    mask.
    """
    kind = _text(draft, _IS)
    if not kind or draft.is_null(_IS_THRESHOLD):
        draft.hold(_IS, "no weights")
        draft.hold(_IS_THRESHOLD, "it counts with rollout_is alone")
        return []
    if kind not in ("token", "sequence"):
        draft.lose(_IS, f"there are no weights of {kind!r}: token or sequence")
        draft.lose(_IS_THRESHOLD, "it counts with rollout_is alone")
        return []
    level = {}
    if kind == "sequence":
        level = {"level": kind}
    try:
        low, high = _bounds(draft.text(_IS_THRESHOLD, "2.0"))
    except ValueError as error:
        draft.lose(_IS_THRESHOLD, f"{error}; 2.0 stands in")
        return [("truncated_is", {"cap": 2.0, **level})]
    if low is None:
        return [("truncated_is", {"cap": high, **level})]
    return [("masked_is", {"low": low, "high": high, **level})]


def _masks(draft: Draft) -> list[_Part]:
    """Return the masks that ``rollout_rs`` asks for; several are separated by commas, and so are
    their bounds.
    """
    kinds = list(dict.fromkeys(str(kind) for kind in draft.items(_RS) if str(kind)))
    if not kinds:
        draft.hold(_RS, "nothing is rejected")
        draft.hold(_RS_THRESHOLD, "it counts with rollout_rs alone")
        return []
    bounds = [str(bound) for bound in draft.items(_RS_THRESHOLD)]
    if len(bounds) == 1:
        bounds = bounds * len(kinds)
    if len(bounds) != len(kinds):
        for name in (_RS, _RS_THRESHOLD):
            draft.lose(
                name,
                f"{counted(len(bounds), 'threshold')} for {counted(len(kinds), 'kind')}: expected one, "
                "or one each",
            )
        return []
    try:
        return [_mask(kind, bound) for kind, bound in zip(kinds, bounds, strict=True)]
    except ValueError as error:
        for name in (_RS, _RS_THRESHOLD):
            draft.lose(name, str(error))
        return []


def _mask(kind: str, threshold: str) -> _Part:
    """Return the mask of one ``rollout_rs``, such as ``seq_mean_k1``. ValueError for what verl
    does not have.
    """
    where, _, estimate = kind.rpartition("_")
    over = where.removeprefix("seq_")
    if estimate not in ("k1", "k2", "k3") or (over != "token" and where != f"seq_{over}"):
        raise ValueError(f"nothing is rejected by {kind!r}: docs/algorithms.md has what there is")
    if over not in ("token", *_OF_ROWS) or (over, estimate) == ("max", "k1"):
        raise ValueError(f"nothing is rejected by {kind!r}: docs/algorithms.md has what there is")
    low, high = _bounds(threshold)
    if estimate != "k1":
        if low is not None:
            raise ValueError(f"{threshold!r}: expected an upper bound alone for {kind}")
        return "reject_divergent", {"limit": high, "estimate": f"{_OURS}:{estimate}", "over": over}
    if low is None:
        low = 1 / high
    # verl bounds the engine's probability over the policy's, and ours are of the policy's over the
    # engine's
    options: dict[str, Any] = {"low": 1 / high, "high": 1 / low}
    if over == "token":
        return "reject_tokens", options
    if over != "mean":
        options["over"] = over
    return "reject_sequences", options


def _bounds(threshold: str) -> tuple[float | None, float]:
    """Return the bounds of ``2.0`` or ``0.5_2.0``, the lower one None where there is one alone."""
    lower, separator, upper = threshold.rpartition("_")
    try:
        high = float(upper)
        low = None
        if separator:
            low = float(lower)
    except ValueError:
        raise ValueError(f"{threshold!r} is no bound: expected 2.0 or 0.5_2.0") from None
    if not high > 0:
        raise ValueError(f"{threshold!r}: expected a bound above 0")
    if low is not None and not 0 < low <= high:
        raise ValueError(f"{threshold!r}: expected a lower bound above 0 and up to the upper one")
    return low, high


def _set_bypass(draft: Draft) -> None:
    """Take the engine's log-probs as the old ones; with ``loss_type=reinforce`` the loss is set
    as well.
    """
    names = (BYPASS_MODE, *_ENGINES_LOGPROBS)
    draft.set_from("algorithm.old_logprobs", ENGINES_LOGPROBS, names)
    if _text(draft, _RS):
        reason = (
            "with bypass_mode rows are not rejected: nobody computed both log-probs before the "
            "update"
        )
        draft.leave_out(_RS, reason, ["algorithm.old_logprobs"])
        draft.lose(_RS_THRESHOLD, reason)
    for name in (_RS, _RS_THRESHOLD):
        draft.hold(name, "nothing is rejected")
    draft.lose(_CAP, "with bypass_mode the loss's ratio is to the sampler already")
    if draft.text(_LOSS_TYPE, "ppo_clip") != "reinforce":
        draft.hold(_LOSS_TYPE, "the loss's ratio is to the sampler")
        for name in (_IS, _IS_THRESHOLD):
            draft.lose(name, "with bypass_mode the loss's ratio is to the sampler already")
        return
    weights = _weights(draft)
    if not weights:
        draft.set("algorithm.loss", f"{_OURS}:policy_gradient", _LOSS_TYPE)
        draft.set("algorithm.loss_options", {}, _LOSS_TYPE)
        return
    name, options = weights[0]
    if name != "truncated_is" or "level" in options or options["cap"] < 1:
        reason = "of REINFORCE's weights there are those of tokens with a cap of at least 1 (cispo)"
        draft.leave_out(_LOSS_TYPE, reason, ["algorithm.loss"])
        for one in (_IS, _IS_THRESHOLD):
            draft.lose(one, reason)
        return
    draft.set("algorithm.loss", f"{_OURS}:cispo", _LOSS_TYPE, _IS)
    note = "its weight is min(ratio, cap)"
    draft.set(
        "algorithm.loss_options",
        {"clip_low": 1.0, "clip_high": options["cap"] - 1},
        _IS_THRESHOLD,
        note=note,
    )


def _text(draft: Draft, name: str) -> str:
    """Return an option's text; "" for null."""
    text = draft.text(name, "")
    if text.lower() in ("null", "none"):
        return ""
    return text
