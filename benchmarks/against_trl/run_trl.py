"""A run of TRL's GRPOTrainer in this process: transformers generates, its trainer learns.

python -m against_trl.run_trl SETTING CURVES.json    # SETTING: JSON
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow.parquet as pq
import torch
from datasets import Dataset
from torch.optim.lr_scheduler import LambdaLR
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from siirl_dask.config import ModelConfig
from siirl_dask.rollout import Sampling
from siirl_dask.rollout.transformers_engine.engine import TransformersEngine
from siirl_dask.tasks.sorting import sorted_digits

from .setting import Curves, Setting, answer_to, prompts_in_order


class Notes(TrainerCallback):
    """Collects what TRL logs for each of our steps, and when."""

    def __init__(self) -> None:
        self.rewards: list[float] = []
        self.entropy: list[float] = []
        self.ends: list[float] = []

    def on_log(
        self,
        args: Any,
        state: Any,
        control: Any,
        logs: dict[str, float] | None = None,
        **others: Any,
    ) -> None:
        if logs and "reward" in logs:  # the last word is of the whole run
            self.ends.append(time.perf_counter())
            self.rewards.append(logs["reward"])
            self.entropy.append(logs["entropy"])


def score(completions: list[str], answer: list[str], **others: object) -> list[float]:
    return [
        sorted_digits(None, given, wanted)
        for given, wanted in zip(completions, answer, strict=True)
    ]


def run_trl(setting: Setting, reward: Callable[..., list[float]] = score) -> Curves:
    """``reward`` is one of TRL's reward functions."""
    torch.set_num_threads(setting.cores)
    notes = Notes()
    with TemporaryDirectory() as folder:
        trainer = GRPOTrainer(
            model=str(setting.task.model),
            reward_funcs=reward,
            args=arguments(setting, folder),
            train_dataset=Dataset.from_list(prompts_in_order(setting)),
            callbacks=[notes],
        )
        train(trainer, setting)
        accuracy = []
        if setting.validate:
            trainer.save_model(folder)
            accuracy = [_accuracy(setting, path) for path in (str(setting.task.model), folder)]
    return Curves(rewards=notes.rewards, entropy=notes.entropy, ends=notes.ends, accuracy=accuracy)


def train(trainer: GRPOTrainer, setting: Setting) -> None:
    """Train with our schedule of learning rates."""
    optimizer = trainer.create_optimizer()
    warmup = max(1, setting.warmup)
    # its own begins at 0
    trainer.lr_scheduler = LambdaLR(optimizer, lambda done: min(1.0, (done + 1) / warmup))
    trainer.train()


def arguments(setting: Setting, folder: str, **others: Any) -> GRPOConfig:
    return GRPOConfig(
        output_dir=folder,
        seed=setting.seed,
        max_steps=setting.steps * setting.minibatches,
        per_device_train_batch_size=setting.rows // setting.minibatches,
        gradient_accumulation_steps=1,
        steps_per_generation=setting.minibatches,
        num_generations=setting.samples,
        shuffle_dataset=False,
        max_completion_length=setting.max_response,
        temperature=setting.temperature,
        learning_rate=setting.lr,
        weight_decay=0.0,
        max_grad_norm=setting.max_grad_norm,
        loss_type="grpo",
        epsilon=setting.clip,
        beta=0.0,
        model_init_kwargs={"dtype": "float32"},
        bf16=False,
        gradient_checkpointing=False,
        use_cpu=True,
        logging_steps=setting.minibatches,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        **others,
    )


def _accuracy(setting: Setting, model: str) -> float:
    """Greedily, by the engine and on the rows that measure our runs."""
    engine = TransformersEngine(ModelConfig(path=model))
    rows = pq.read_table(setting.task.validation).to_pylist()
    prompts = [engine.tokenizer.encode(row["prompt"]) for row in rows]
    greedy = Sampling(max_tokens=setting.max_response, temperature=0.0)
    given = [
        engine.tokenizer.decode(one.token_ids, skip_special=True)
        for one in engine.generate(prompts, [0] * len(prompts), greedy)
    ]
    return sum(score(given, [row["answer"] for row in rows])) / len(rows)


if __name__ == "__main__":
    answer_to(sys.argv[1:], run_trl)
