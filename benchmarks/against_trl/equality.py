"""One update by TRL's trainer and by ours, on the same completions: its loss and its gradient.

    python -m against_trl.equality MODEL RECORD.json

TRL's own ``GRPOTrainer`` samples and scores the completions and computes its losses; ours learns
through the Trainer protocol. The old and the reference log-probs are the model's with noise, so
that ratios are clipped.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from siirl_dask.algorithms import Outcomes, dr_grpo, grpo
from siirl_dask.config import TrainerConfig
from siirl_dask.training import Trainer

from .cases import Case, cases
from .rows import Rows, packed_tokens, padded
from .sampled import SAMPLES, Scored, sample, trl_trainer
from .update import Update, apart, distance, is_equal, make_trainer, our_update

_NOISE = 0.3  # standard deviation: half of the ratios are beyond 0.8 to 1.2
_TRL_EPSILON = 1e-4  # that TRL adds to the standard deviation of a group's rewards


def compare_losses(model: Path, scratch: Path) -> dict[str, Any]:
    """A record of each case, and how far advantages are apart, relatively."""
    rows, by_group = sample(model, scratch, "group")
    rows = _noisy(rows, make_trainer(model, TrainerConfig()))
    _, by_none = sample(model, scratch, "none")
    return {
        "rows": len(rows),
        "tokens": sum(rows.lengths),
        "cases": [compare(case, model, scratch, rows) for case in cases()],
        "advantages": _advantages(by_group, by_none),
    }


def compare(case: Case, model: Path, scratch: Path, rows: Rows) -> dict[str, Any]:
    """``equal``: both numbers are within bounds; ``differs``: why they need not be."""
    mine, trls = our_update(case, model, rows), trl_update(case, model, scratch, rows)
    found = apart(mine, trls)
    said = {"case": case.name, "ours": case.ours, "differs": case.differs}
    return {**said, "loss": mine[0], "loss_trl": trls[0], **found, "equal": is_equal(found)}


def trl_update(case: Case, model: Path, scratch: Path, rows: Rows) -> Update:
    """``GRPOTrainer.compute_loss`` and its gradient, accumulated over micro-batches as its
    training loop does.
    """
    parts, accumulated = case.micro_batches * case.minibatches, case.micro_batches
    trainer = trl_trainer(
        model, scratch, len(rows), parts=parts, accumulated=accumulated, **case.trl
    )
    inputs = padded(rows, trainer.processing_class.pad_token_id)
    tokens, size, loss = inputs["completion_mask"].sum(), len(rows) // parts, 0.0
    for part in range(case.micro_batches):
        mine = {name: values[part * size :][:size] for name, values in inputs.items()}
        value = trainer.compute_loss(trainer.model, {**mine, "num_items_in_batch": tokens})
        value.backward()
        loss += value.item()
    return loss, {name: parameter.grad for name, parameter in trainer.model.named_parameters()}


def _advantages(by_group: Scored, by_none: Scored) -> dict[str, float]:
    def off(mine: Tensor, scored: Scored) -> float:
        return distance({"advantages": mine}, {"advantages": scored.advantages})

    def outcomes(scored: Scored) -> Outcomes:
        groups = torch.arange(len(scored.rewards) // SAMPLES).repeat_interleave(SAMPLES)
        return Outcomes(rewards=scored.rewards, group_ids=groups, lengths=torch.ones_like(groups))

    std = by_group.rewards.unflatten(0, (-1, SAMPLES)).std(1).repeat_interleave(SAMPLES)
    return {
        "grpo": off(grpo(outcomes(by_group)), by_group),
        "grpo_with_trls_epsilon": off(dr_grpo(outcomes(by_group)) / (std + _TRL_EPSILON), by_group),
        "dr_grpo": off(dr_grpo(outcomes(by_none)), by_none),
    }


def _noisy(rows: Rows, trainer: Trainer) -> Rows:
    scores = trainer.logprobs(packed_tokens(rows)).logprobs.split(rows.lengths)
    noise = torch.Generator().manual_seed(0)
    old, reference = (
        [row + _NOISE * torch.randn(len(row), generator=noise) for row in scores] for _ in range(2)
    )
    return replace(rows, old_logprobs=old, reference_logprobs=reference)


if __name__ == "__main__":
    with TemporaryDirectory() as folder:
        found = compare_losses(Path(sys.argv[1]), Path(folder))
    Path(sys.argv[2]).write_text(json.dumps(found))
