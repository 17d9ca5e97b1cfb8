"""Seconds of a step as ``siirl-dask plan --on DEVICE`` shows them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from siirl_dask.config import Config
from siirl_dask.errors import ConfigError
from siirl_dask.estimates.computing_seconds import StepTokens
from siirl_dask.estimates.performance import Split, StepTime, lengths_of, splits, step_time
from siirl_dask.estimates.speeds import Speed, speed_of
from siirl_dask.planner import Plan
from siirl_dask.wording import table

_SHOWN = 3  # splits


@dataclass(frozen=True, slots=True)
class TimingOptions:
    """Options of ``plan`` that ask for the seconds of a step."""

    device: str | None = None
    """Short name of a device; None: no seconds are asked for."""
    tokens: str | None = None
    figures: Sequence[str] = ()

    def resolve(self, config: Config) -> ResolvedTiming | None:
        """Return the figures of the device, and lengths; None where no device is named.
        ConfigError for other words.
        """
        if self.device is None:
            if self.tokens is not None or self.figures:
                raise ConfigError(
                    "--tokens and --figure belong to --on, which names a device, such as --on h100"
                )
            return None
        lengths = lengths_of(config, self.tokens)
        return ResolvedTiming(speed_of(self.device, self.figures, config.cluster.threads), lengths)


@dataclass(frozen=True, slots=True)
class ResolvedTiming:
    """A device and lengths for which seconds are estimated."""

    speed: Speed
    lengths: StepTokens

    def estimate(self, config: Config, plan: Plan) -> Estimated:
        """Return the seconds of a step of ``plan``, and the fastest splits of its workers."""
        found = step_time(config, plan, self.speed, self.lengths)
        rows = config.data.batch_size * config.rollout.n
        return Estimated(
            self, plan, rows, found, splits(config, plan, self.speed, self.lengths)[:_SHOWN]
        )


@dataclass(frozen=True, slots=True)
class Estimated:
    """Estimated seconds of a step."""

    timing: ResolvedTiming
    plan: Plan
    rows: int
    step: StepTime | None
    splits: Sequence[Split]

    def text(self) -> str:
        """Return the section of a plan's text."""
        speed = self.timing.speed
        lengths = self.timing.lengths
        head = (
            f"== time ==\n\nOn {speed.name} ({speed.source}), rows of {lengths.prompt:g} + "
            f"{lengths.response:g} tokens"
        )
        if self.step is None:
            return f"{head}: not known, since the size of a model is not"
        roles = {node.name: node.role for node in self.plan.dag.nodes}
        total = self.step.seconds
        rows = []
        for name, took in self.step.nodes.items():
            rows.append((name, roles[name], _seconds(took), f"{took / total:.0%}"))
            moves = self.step.moves.get(name, {})
            rows += [
                (f"- {what}", "", _seconds(each), f"{each / total:.0%}")
                for what, each in moves.items()
            ]
        rows.append(("all", "", _seconds(total), ""))
        idle = ", ".join(f"{role} {share:.0%}" for role, share in self.step.idle.items())
        tokens = self.rows * (lengths.prompt + lengths.response) / total
        last = [
            f"About {_seconds(total)} s a step: {self.rows / total:,.1f} rows or {tokens:,.0f} "
            f"tokens a second. Longest: {self.step.bottleneck}. Idle: {idle}."
        ]
        if self.splits:
            best = "; ".join(
                f"{one.text(len(self.plan.chains))}, {_seconds(one.seconds)} s"
                for one in self.splits
            )
            last.append(f"Splits of the workers, fastest first, whether they fit or not: {best}.")
        return "\n".join([head, table(("node", "role", "seconds", "of the step"), rows), *last])

    def as_data(self) -> dict[str, Any] | None:
        """Return it as plain data; None where it is not known."""
        if self.step is None:
            return None
        return {
            "device": self.timing.speed.name,
            "seconds": self.step.seconds,
            "nodes": dict(self.step.nodes),
            "moves": {name: dict(moves) for name, moves in self.step.moves.items()},
            "idle": dict(self.step.idle),
            "bottleneck": self.step.bottleneck,
            "splits": [
                {
                    "rollout": one.rollout,
                    "policy": one.policy,
                    "together": one.together,
                    "seconds": one.seconds,
                }
                for one in self.splits
            ],
        }


def _seconds(value: float) -> str:
    if value >= 100:
        return f"{value:,.0f}"
    if value < 10:
        return f"{value:.2g}"
    return f"{value:.1f}"
