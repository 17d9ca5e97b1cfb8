"""The runs of both sides in one picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from .runs import OURS, TOLD, TRL, WHOLE

_LOOKS = {
    OURS: ("siirl_dask, rows drawn as by TRL", "tab:blue"),
    TRL: ("TRL", "tab:orange"),
    TOLD: ("siirl_dask, the engine's log-probs", "tab:green"),
    WHOLE: ("siirl_dask, prompts whole", "tab:gray"),
}
_PANELS = {"rewards": "mean reward of the step's samples", "entropy": "entropy, nats a token"}


def plot_curves(path: Path, found: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    """Thin: a seed; thick: their mean."""
    mpl.use("agg")
    figure, axes = plt.subplots(1, len(_PANELS), figsize=(11, 4), layout="constrained")
    for panel, (quantity, label) in zip(axes, _PANELS.items(), strict=True):
        for side, runs in found.items():
            _draw(panel, side, np.array([run[quantity] for run in runs]))
        panel.set_xlabel("step")
        panel.set_ylabel(label)
        panel.grid(alpha=0.3)
    axes[0].legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _draw(panel: Axes, side: str, runs: np.ndarray[Any, Any]) -> None:
    """[seeds, steps]."""
    name, color = _LOOKS[side]
    steps = np.arange(1, runs.shape[1] + 1)
    for run in runs:
        panel.plot(steps, run, color=color, alpha=0.3, linewidth=0.8)
    panel.plot(steps, runs.mean(0), color=color, linewidth=2, label=name)
