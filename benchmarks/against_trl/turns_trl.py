"""A run of TRL's GRPOTrainer with an ``environment_factory`` in this process.

python -m against_trl.turns_trl SETTING CURVES.json    # SETTING: JSON
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from siirl_dask.models.broken_imports import hide

hide()

import torch  # noqa: E402
from datasets import Dataset  # noqa: E402
from trl import GRPOTrainer  # noqa: E402

from siirl_dask.config import (  # noqa: E402
    Engine,
    EnvironmentsConfig,
    ModelConfig,
    RolloutConfig,
    ValidationConfig,
)
from siirl_dask.context import Context, Device, Rank  # noqa: E402
from siirl_dask.environments import build_environments  # noqa: E402
from siirl_dask.nodes import encode_prompts, play_answers  # noqa: E402
from siirl_dask.rollout import build_engine  # noqa: E402
from siirl_dask.schema import GROUP_ID, REWARD, ROW_ID, TOKENS, TYPES  # noqa: E402
from siirl_dask.tasks.calculator import Calculator  # noqa: E402

from .run_trl import Notes, arguments, train  # noqa: E402
from .setting import Curves, answer_to, prompts_in_order  # noqa: E402
from .turns_ours import EPISODES  # noqa: E402
from .turns_setting import SlowCalculator, TurnsSetting  # noqa: E402


class Tools:
    """The calculator in TRL's shape: ``reset`` gets the row, and each other public method is a
    tool.
    """

    _calculator: Calculator

    def reset(self, **row: Any) -> None:
        """Begin an episode; the prompt is the row's own."""
        self._calculator.reset(row, 0)

    def add(self, first: int, second: int) -> str:
        """Add two numbers.

        Args:
            first: A number.
            second: Another one.
        """
        return self._calculator.add(first, second)


class QuickTools(Tools):
    """Tools that answer at once."""

    def __init__(self) -> None:
        self._calculator = Calculator()


class SlowTools(Tools):
    """Tools that answer after a while."""

    def __init__(self) -> None:
        self._calculator = SlowCalculator()


def run_trl(setting: TurnsSetting) -> Curves:
    torch.set_num_threads(setting.cores)
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    notes = Notes()
    with TemporaryDirectory() as folder:
        trainer = GRPOTrainer(
            model=str(setting.task.model),
            reward_funcs=score,
            args=arguments(setting, folder, max_tool_calling_iterations=setting.turns - 1),
            train_dataset=Dataset.from_list(prompts_in_order(setting)),
            environment_factory=SlowTools if setting.slow else QuickTools,
            callbacks=[notes],
        )
        train(trainer, setting)
        success = []
        if setting.validate:
            trainer.save_model(folder)
            success = [measure_success(setting, path) for path in (str(setting.task.model), folder)]
    return Curves(rewards=notes.rewards, entropy=notes.entropy, ends=notes.ends, accuracy=success)


def score(
    completions: Sequence[Sequence[Mapping[str, Any]]], answer: Sequence[str], **others: object
) -> list[float]:
    """Return 1 where the last message, which the policy wrote, is the sum, else 0."""
    return [
        float(given[-1]["content"].strip() == wanted)
        for given, wanted in zip(completions, answer, strict=True)
    ]


def measure_success(setting: TurnsSetting, model: str) -> float:
    """Return the mean reward of sampled episodes of the validation data, by the node that
    measures our runs.
    """
    rollout = RolloutConfig(
        engine=Engine.transformers, max_response_length=setting.max_response, max_rows=setting.rows
    )
    environments = EnvironmentsConfig(turns=setting.turns)
    validation = ValidationConfig(n=EPISODES, temperature=setting.temperature)
    device, given = Device("bench"), ModelConfig(path=model)
    engine = build_engine(device, Rank(), model=given, rollout=rollout)
    world = build_environments(
        device, Rank(), environments=environments, environment=Calculator, model=given
    )
    table = pq.read_table(setting.task.validation)
    for name in (ROW_ID, GROUP_ID, TOKENS):
        table = table.append_column(name, pa.array(range(table.num_rows), TYPES[name]))
    ctx = Context(1, 0, Rank(), device, engine, resources={"environments": world})
    try:
        prompts = encode_prompts(ctx, table, max_prompt_length=setting.max_prompt)
        played = play_answers(
            ctx,
            prompts,
            rollout=rollout,
            environments=environments,
            validation=validation,
            max_prompt_length=setting.max_prompt,
        )
    finally:
        world.close()
        engine.close()
    return float(played[REWARD].to_numpy().mean())


if __name__ == "__main__":
    answer_to(sys.argv[1:], run_trl, TurnsSetting)
