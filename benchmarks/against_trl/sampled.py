"""Completions by TRL's own ``GRPOTrainer``, with its own advantages: what both sides are to
learn from.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor
from trl import GRPOConfig, GRPOTrainer

from siirl_dask.tasks.sorting import sorted_digits

from .cases import MAX_RESPONSE
from .rows import Rows

PROMPTS, SAMPLES = 16, 8
# a loss that is a difference of nearly equal numbers has few digits in float32: fewer bad rows
_BEST, _WORST = (60, 4)


@dataclass(frozen=True, slots=True)
class Scored:
    """Rewards and the advantages that TRL computed from them."""

    rewards: Tensor
    """[N], one group of ``SAMPLES`` after the other."""
    advantages: Tensor
    """[N]."""


def trl_trainer(
    model: Path, scratch: Path, rows: int, *, parts: int = 1, accumulated: int = 1, **options: Any
) -> Any:
    """A GRPOTrainer in float32 on the CPU that generates ``rows`` at once and learns from them
    in ``parts``.
    """
    config = GRPOConfig(
        output_dir=str(scratch),
        per_device_train_batch_size=rows // parts,
        gradient_accumulation_steps=accumulated,
        steps_per_generation=parts,
        num_generations=SAMPLES,
        max_completion_length=MAX_RESPONSE,
        model_init_kwargs={"dtype": "float32"},
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        report_to="none",
        **options,
    )
    data = Dataset.from_list([{"prompt": "Sort: 1 2 3 =", "answer": "1 2 3"}] * PROMPTS)
    trainer = GRPOTrainer(model=str(model), reward_funcs=score, args=config, train_dataset=data)
    trainer.current_gradient_accumulation_steps = accumulated  # what its training loop would say
    trainer.model.train()
    return trainer


def score(
    completions: Sequence[str], answer: Sequence[str], **others: object
) -> list[float | None]:
    """1 for the sorted digits, and a little for every digit in its place: there must be groups
    that have a spread.
    """
    return [
        sorted_digits(None, completion, wanted)
        + 0.125 * sum(a == b for a, b in zip(completion.split(), wanted.split(), strict=False))
        for completion, wanted in zip(completions, answer, strict=True)
    ]


def sample(model: Path, scratch: Path, scale_rewards: str, seed: int = 0) -> tuple[Rows, Scored]:
    """Rows with responses cut at random lengths, so that means over tokens and over rows are not
    the same; and what TRL made of the rewards of all.
    """
    order = random.Random(seed)
    tasks = [order.choices("0123456789", k=order.randint(3, 7)) for _ in range(PROMPTS)]
    asked = [
        {"prompt": f"Sort: {' '.join(task)} =", "answer": " ".join(sorted(task))} for task in tasks
    ]
    trainer = trl_trainer(model, scratch, PROMPTS * SAMPLES, seed=seed, scale_rewards=scale_rewards)
    output = trainer._generate_and_score_completions([row for row in asked for _ in range(SAMPLES)])
    rewards = torch.tensor(list(trainer._logs["rewards"]["score"]))
    ranked = output["advantages"].argsort(descending=True, stable=True).tolist()
    chosen = [*ranked[:_BEST], *ranked[-_WORST:]]
    order.shuffle(chosen)  # a micro-batch shall not be of good rows alone
    rows = Rows(
        prompts=_unpadded(output, "prompt", chosen),
        responses=[
            ids[: order.randint(1, MAX_RESPONSE)] for ids in _unpadded(output, "completion", chosen)
        ],
        advantages=output["advantages"][chosen],
    )
    return rows, Scored(rewards, output["advantages"])


def _unpadded(output: dict[str, Tensor], side: str, chosen: Sequence[int]) -> list[list[int]]:
    return [
        output[f"{side}_ids"][row][output[f"{side}_mask"][row].bool()].tolist() for row in chosen
    ]
