"""One update by ours: its loss and its gradient, through the Trainer protocol."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from siirl_dask.config import ModelConfig, RolloutConfig, TrainerConfig
from siirl_dask.context import Device, Rank
from siirl_dask.training import Trainer, build_trainer

from .cases import Case
from .rows import Rows, packed

LOSS_WITHIN, GRADIENT_WITHIN = 1e-6, 1e-5
Update = tuple[float, Mapping[str, Tensor]]
"""Loss, and gradient by the parameter's name."""


def our_update(case: Case, model: Path, rows: Rows) -> Update:
    """The first moment of an Adam that forgets all is the gradient; the limit on its norm is out
    of reach.
    """
    longest = 400 if case.micro_batches > 1 else 16384
    settings = TrainerConfig(
        betas=(0.0, 0.999), max_grad_norm=1e9, max_tokens_per_micro_batch=longest
    )
    trainer = make_trainer(model, settings)
    metrics = trainer.update(
        [packed(rows.first(len(rows) // case.minibatches))], case.loss, case.aggregate
    )
    moments = trainer.state()["optimizer"]
    return metrics["loss"], {name: state["exp_avg"] for name, state in moments.items()}


def make_trainer(model: Path, settings: TrainerConfig) -> Trainer:
    """Alone, at temperature 1."""
    given = ModelConfig(path=str(model))
    return build_trainer(
        Device("alone"), Rank(), model=given, trainer=settings, rollout=RolloutConfig()
    )


def apart(mine: Update, other: Update) -> dict[str, float]:
    """``loss_apart`` and ``gradient_apart``, relative to the other's."""
    return {
        "loss_apart": abs(mine[0] - other[0]) / abs(other[0]),
        "gradient_apart": distance(mine[1], other[1]),
    }


def is_equal(found: Mapping[str, float]) -> bool:
    """Return whether the distances that ``apart`` measured are within bounds."""
    return found["loss_apart"] <= LOSS_WITHIN and found["gradient_apart"] <= GRADIENT_WITHIN


def distance(gradient: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    """Norm of the difference over the norm of ``other``, of all parameters together. ValueError
    for other names.
    """
    if gradient.keys() != other.keys():
        raise ValueError(
            f"only one side has the parameters {sorted(gradient.keys() ^ other.keys())}"
        )
    off = torch.stack(
        [(gradient[name].double() - other[name].double()).norm() for name in other]
    ).norm()
    return float(off / torch.stack([other[name].double().norm() for name in other]).norm())
