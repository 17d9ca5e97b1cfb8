"""Settings of a run that both sides are given."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from siirl_dask.coordinator.dataloader import Dataloader, Source
from siirl_dask.schema import ANSWER, PROMPT
from siirl_dask.tasks.sorting import Task, task_in


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """GRPO without a KL on the task in ``folder``. The numbers are those of
    configs/quickstart.yaml.
    """

    folder: str
    steps: int = 60
    seed: int = 0
    prompts: int = 32
    """Per step."""
    samples: int = 8
    """Samples per prompt."""
    minibatches: int = 4
    """Optimiser steps per step."""
    mixed: bool = True
    """Rows are drawn into mini-batches one by one, as TRL has it; else prompts with all their
    samples, as we do unless told otherwise.
    """
    told: bool = False
    """Our old log-probs are those that the engine tells; else of a pass of the policy, as TRL's
    are."""
    lr: float = 1e-4
    warmup: int = 5
    """Optimiser steps."""
    temperature: float = 1.0
    max_prompt: int = 32
    max_response: int = 12
    clip: float = 0.2
    max_grad_norm: float = 1.0
    threads: int = 1
    """Threads that torch computes with on each core's worker, or on each core of TRL's one
    process."""
    workers: int = 1
    """Workers of our side: 1 or 2 that do everything, on as many cores; or 4 on two cores, two
    of which generate."""
    validate: bool = True
    """Before the first step and after the last, greedily."""

    @property
    def task(self) -> Task:
        return task_in(self.folder)

    @property
    def cores(self) -> int:
        """Cores that each side gets."""
        return min(2, self.workers) * self.threads

    @property
    def rows(self) -> int:
        """Samples of a step."""
        return self.prompts * self.samples


@dataclass(frozen=True, slots=True)
class Curves:
    """Curves of one run, one number a step."""

    rewards: list[float]
    """Means of the step's samples."""
    entropy: list[float]
    """Nats; mean of the step's response tokens, each under the policy that is about to learn
    from it."""
    ends: list[float]
    """Seconds at which the steps ended, on a clock of their own."""
    accuracy: list[float]
    """On the validation data, before and after; empty without validation."""

    def samples_per_second(self, rows: int, skip: int) -> float:
        """Return the throughput of the steps after the first ``skip``, which must leave at least
        one.
        """
        return rows * (len(self.ends) - skip) / (self.ends[-1] - self.ends[skip - 1])


def prompts_in_order(setting: Setting) -> list[dict[str, Any]]:
    """``prompt`` and ``answer`` of every prompt of the run, step after step, as its dataloader
    draws them.
    """
    source = Source(
        url=str(setting.task.train),
        prompt="prompt",
        answer="answer",
        batch_size=setting.prompts,
        seed=setting.seed,
    )
    loader = Dataloader(source)
    try:
        steps = [loader.load(step, [PROMPT, ANSWER], 0, 1) for step in range(setting.steps)]
    finally:
        loader.close()
    return [row for step in steps for row in step.select([PROMPT, ANSWER]).to_pylist()]


def answer_to(
    arguments: list[str], run: Callable[[Any], Curves], kind: type[Setting] = Setting
) -> None:
    """The main of a side: a setting of this kind as JSON, and where its Curves go."""
    given, out = arguments
    curves = run(kind(**json.loads(given)))
    Path(out).write_text(json.dumps(asdict(curves)))
