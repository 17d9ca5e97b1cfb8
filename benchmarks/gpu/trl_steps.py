"""Measures steps of TRL's GRPOTrainer on the model and rows of the figures.  python trl_steps.py
OUT
"""

from __future__ import annotations

import sys
import time
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import trl
from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback

import results
from setting import WORK, model_folder, setting
from tests.gpu import devices

STEPS = 3


class Clock(TrainerCallback):
    """Takes the seconds of each step, until the device has finished it."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._began = 0.0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._began = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        devices.finish()
        self.seconds.append(results.rounded(time.perf_counter() - self._began))


def reward(completions: Sequence[object], **_: Any) -> list[float]:
    """Return a number from the text alone, so that groups have advantages."""
    return [float(zlib.crc32(str(text).encode()) % 7) for text in completions]


def main() -> None:
    out = Path(sys.argv[1])
    chosen = setting()
    folder = str(model_folder())
    tokenizer = AutoTokenizer.from_pretrained(folder)
    word = tokenizer.decode([5])
    prompts = [word * (chosen.prompt + number % 3) for number in range(64)]
    arguments = trl.GRPOConfig(
        output_dir=str(WORK / "trl"),
        max_steps=STEPS,
        per_device_train_batch_size=chosen.micro_rows,
        gradient_accumulation_steps=chosen.rows // chosen.micro_rows,
        num_generations=min(8, chosen.rows),
        max_completion_length=chosen.response,
        generation_kwargs={"min_new_tokens": chosen.response},
        bf16=not devices.ON_CPU,
        use_cpu=devices.ON_CPU,
        learning_rate=1e-6,
        beta=0.0,
        temperature=1.0,
        gradient_checkpointing=False,
        model_init_kwargs={"dtype": "float32"},
        report_to="none",
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
    )
    clock = Clock()
    trainer = trl.GRPOTrainer(
        model=folder,
        reward_funcs=reward,
        args=arguments,
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        processing_class=tokenizer,
        callbacks=[clock],
    )
    trainer.train()
    results.append(
        out,
        part="trl",
        figure="trl",
        version=trl.__version__,
        step_s=clock.seconds,
        rows=chosen.rows,
        response=chosen.response,
        peak_gib=results.rounded(
            0.0 if devices.ON_CPU else torch.cuda.max_memory_allocated() / 2**30
        ),
    )


if __name__ == "__main__":
    main()
