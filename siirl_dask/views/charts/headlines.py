"""The metrics that are asked of every run, and their titles, for reports and terminals."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from siirl_dask.observe import Record, agents_with
from siirl_dask.planner import Phase

SECONDS = "seconds"
"""Stands for the seconds of an iteration, which are no metric but a field of each record."""
HEADLINES: dict[tuple[Phase, str], str] = {
    (Phase.TRAIN, "reward/mean"): "training reward",
    (Phase.VALIDATION, "reward/mean"): "validation reward",
    (Phase.TRAIN, "policy/entropy"): "policy entropy (nats per token)",
    (Phase.TRAIN, "response/length"): "response length (tokens)",
    (Phase.TRAIN, "response/truncated"): "responses cut at the limit (share)",
    (Phase.TRAIN, "policy/kl_to_sampler"): "KL of sampler and policy",
    (Phase.TRAIN, "policy/reference_kl"): "KL to the reference",
    (Phase.TRAIN, "policy/clip_fraction"): "clipped tokens (share)",
    (Phase.TRAIN, "policy/grad_norm"): "gradient norm",
    (Phase.TRAIN, "policy/loss"): "policy loss",
    (Phase.TRAIN, "critic/loss"): "critic loss",
    (Phase.TRAIN, "mismatch/kl"): "KL of engine and trainer",
    (Phase.TRAIN, "staleness/mean"): "age of the sampling weights (steps)",
    (Phase.TRAIN, SECONDS): "seconds of a step",
    (Phase.TRAIN, "tokens_per_second"): "tokens a second",
    (Phase.TRAIN, "bytes/peers"): "bytes from worker to worker",
}
"""Titles by phase and metric; what a run does not log, or is always 0, need not be shown."""


def headlines_of(records: Sequence[Record]) -> dict[tuple[Phase, str], str]:
    """Return the headlines, each followed by those of single agents that logged the metric."""
    found = {}
    for (phase, name), title in HEADLINES.items():
        found[phase, name] = title
        found |= {
            (phase, f"{agent}/{name}"): f"{agent}: {title}" for agent in agents_with(records, name)
        }
    return found


_ALWAYS = ("reward/mean",)
"""Metrics that are shown also where they are always 0."""


def is_shown(metric: str, values: Iterable[float]) -> bool:
    """Return whether a metric says something: one that is always 0 does not, but for the reward."""
    if metric in _ALWAYS:
        return True
    return any(values)
