"""Plots a run from ``<run.url>/metrics.jsonl``: mean reward and its spread, validation accuracy, entropy."""

from __future__ import annotations

import io
import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from siirl_storage import open_fs, write_atomic

from siirl_dask.observe.agents import agents_with
from siirl_dask.observe.metrics import Record, read_metrics
from siirl_dask.planner import Phase

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Distinct for the colour-blind, too.
_BLUE = "#0072B2"
_GREEN = "#009E73"
_ORANGE = "#D55E00"
_PURPLE = "#8E4A84"
_GREY = "#666666"


def plot_run(url: str, png_url: str, title: str | None = None) -> None:
    """Draw the run at ``url`` into a PNG at ``png_url``, any fsspec URL.

    The default title is the name of the run's folder. A panel whose metric was not logged says so.
    """
    records = read_metrics(url)
    fs, path = open_fs(png_url)
    write_atomic(fs, path, draw(records, title or url.rstrip("/").rpartition("/")[2]))


def draw(records: Sequence[Record], title: str) -> bytes:
    """Return the plot as the bytes of a PNG."""
    from matplotlib.figure import Figure  # here: it takes half a second; not pyplot, which has windows and globals

    figure = Figure(figsize=(12, 3.7), dpi=150, layout="constrained")
    figure.suptitle(title, fontsize=13, fontweight="bold", parse_math=False)  # "$" is part of a name
    reward, accuracy, entropy = figure.subplots(1, 3, sharex=True)
    _draw_reward(reward, records)
    _draw_accuracy(accuracy, records)
    _draw_entropy(entropy, records)
    png = io.BytesIO()
    figure.savefig(png, format="png")
    return png.getvalue()


def _draw_reward(axes: Axes, records: Sequence[Record]) -> None:
    _dress(axes, "training reward")
    steps, means = _series(records, Phase.TRAIN, "reward/mean")
    if not steps:
        _say_missing(axes)
        return
    spread = dict(zip(*_series(records, Phase.TRAIN, "reward/std"), strict=True))
    banded = [(step, mean, spread[step]) for step, mean in zip(steps, means, strict=True) if step in spread]
    if banded:
        at, low, high = zip(*((step, mean - std, mean + std) for step, mean, std in banded), strict=True)
        axes.fill_between(at, low, high, color=_BLUE, alpha=0.15, linewidth=0, label="± 1 standard deviation")
        if min(means) >= 0 and max(means) <= 1:  # most likely a share, which is never below 0 or above 1
            axes.set_ylim(max(min(low), 0) - 0.02, min(max(high), 1) + 0.02)
    axes.plot(steps, means, color=_BLUE, label="mean", marker=_marker(steps))
    axes.legend(frameon=False, fontsize=8, loc="best")


def _draw_accuracy(axes: Axes, records: Sequence[Record]) -> None:
    _dress(axes, "validation accuracy")
    steps, scores = _series(records, Phase.VALIDATION, "reward/mean")
    tested, test_scores = _series(records, Phase.TEST, "reward/mean")
    if not steps and not tested:
        _say_missing(axes)
        return
    axes.plot(steps, scores, color=_GREEN, marker="o", markersize=5, label="validation")
    if tested:
        axes.plot(tested, test_scores, color=_ORANGE, marker="D", markersize=6, linestyle="none", label="test")
        axes.legend(frameon=False, fontsize=8, loc="best")
    if len(steps) > 1:
        away = 9 if scores[-1] >= scores[0] else -9  # points: labels keep clear of a curve that rises, or falls
        _label(axes, steps[0], scores[0], (6, -away), "left")
        _label(axes, steps[-1], scores[-1], (4, away), "right")
    axes.margins(y=0.18)


def _draw_entropy(axes: Axes, records: Sequence[Record]) -> None:
    _dress(axes, "policy entropy (nats per token)")
    agents = agents_with(records, "policy/entropy")
    for agent, color in zip(["", *agents], itertools.cycle((_PURPLE, _BLUE, _ORANGE, _GREEN)), strict=False):
        steps, entropies = _series(records, Phase.TRAIN, f"{agent}/policy/entropy" if agent else "policy/entropy")
        if steps:
            axes.plot(steps, entropies, color=color, marker=_marker(steps), label=agent)
    if not axes.lines:
        _say_missing(axes)
    elif agents:
        axes.legend(frameon=False, fontsize=8, loc="best")


def _series(records: Sequence[Record], phase: Phase, name: str) -> tuple[list[int], list[float]]:
    """Return steps and values where the metric has one."""
    logged = [(r["step"], r["metrics"].get(name)) for r in records if r["phase"] == phase]
    kept = [(step, value) for step, value in logged if value is not None]
    return [step for step, _ in kept], [value for _, value in kept]


def _marker(steps: Sequence[int]) -> str:
    return "o" if len(steps) == 1 else ""  # a line through one point is invisible


def _dress(axes: Axes, title: str) -> None:
    axes.set_title(title, fontsize=11, loc="left", color=_GREY)
    axes.set_xlabel("step", fontsize=9, color=_GREY)
    axes.tick_params(labelsize=9, colors=_GREY, length=0)
    axes.locator_params(axis="x", integer=True)
    axes.grid(alpha=0.25, linewidth=0.7)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)


def _label(axes: Axes, step: int, score: float, offset: tuple[int, int], side: Literal["left", "right"]) -> None:
    text = f"{score:.2f}"
    point = (step, score)
    axes.annotate(text, point, offset, textcoords="offset points", horizontalalignment=side, va="center", fontsize=9)


def _say_missing(axes: Axes) -> None:
    axes.text(0.5, 0.5, "not logged", transform=axes.transAxes, ha="center", va="center", color=_GREY)
    axes.set_yticks([])
