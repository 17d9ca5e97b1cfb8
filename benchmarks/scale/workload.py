"""Workload of the lab's runs: a GRPO step whose rows have given lengths, and a hand-over of
weights alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from siirl_dask.config import Config
from siirl_dask.context import Context
from siirl_dask.models.broken_imports import hide
from siirl_dask.nodes import load_weights, publish_weights
from siirl_dask.planner import DAG, Node, Role, Rows, columns
from siirl_dask.recipes.grpo import grpo
from siirl_dask.rollout import build_engine
from siirl_dask.training import build_trainer

from .model import StepRows

GROUP, PROMPT_TOKENS, MINIBATCHES = 4, 16, 2
_PROMPTS, _SIGMA = 512, 0.5


@dataclass(frozen=True, slots=True)
class Size:
    """A model and the lengths of its responses."""

    name: str
    hidden: int
    layers: int
    median: int
    """Median of the log-normal distribution of response lengths."""
    longest: int
    prompts: int = 4
    """Prompts of a step."""

    @property
    def shape(self) -> dict[str, int]:
        heads = max(1, self.hidden // 64)
        return {
            "hidden": self.hidden,
            "layers": self.layers,
            "heads": heads,
            "kv_heads": max(1, heads // 2),
            "head_dim": 64,
            "intermediate": 3 * self.hidden,
        }


WORK = Size("12.8M", hidden=512, layers=4, median=12, longest=32)
EMPTY = Size("0.1M", hidden=64, layers=1, median=1, longest=1)
"""Almost nothing to compute and to send: what is left is what a step costs by itself."""


def make_model(folder: Path, size: Size) -> int:
    """Write a model whose responses end where they are told to, and return the bytes of its
    parameters.
    """
    hide()
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    from siirl_dask.tasks.tiny_model import tiny_model

    tiny_model(folder, **size.shape)  # type: ignore[arg-type]  # they are whole numbers
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.eos_token = None
    tokenizer.save_pretrained(folder)
    GenerationConfig().save_pretrained(folder)
    return sum(
        tensor.numel() * 4 for tensor in AutoModelForCausalLM.from_pretrained(folder).parameters()
    )


def make_data(path: Path, size: Size) -> None:
    prompts = [f"{number:0{PROMPT_TOKENS}d}" for number in range(_PROMPTS)]
    lengths = pa.array(draw_lengths(size, _PROMPTS, np.random.default_rng(0)), pa.int32())
    pq.write_table(pa.table({"prompt": prompts, "answer": prompts, "length": lengths}), path)


def draw_lengths(size: Size, prompts: int, rng: np.random.Generator) -> list[int]:
    drawn = rng.lognormal(np.log(size.median), _SIGMA, prompts)
    return [int(length) for length in np.clip(drawn, 1, size.longest)]


def draw_rows(size: Size, rng: np.random.Generator) -> StepRows:
    """Return rows as those of a step; which prompts a step has, the seed of its run decides."""
    responses = np.repeat(np.array(draw_lengths(size, size.prompts, rng)), GROUP)
    return StepRows(np.full(len(responses), PROMPT_TOKENS), responses, GROUP)


@columns(reads=["length"], writes={"max_tokens": pa.int32()})
def end_there(ctx: Context, table: pa.Table) -> pa.Table:
    """Give responses the lengths that the dataset says."""
    return table.append_column("max_tokens", table["length"])


def some_reward(prompt: str, response: str, answer: str) -> float:
    """Score rows of a group differently, so that there is something to learn."""
    return float(len(response.encode()) % 7)


@columns()
def begin(ctx: Context, table: pa.Table) -> pa.Table:
    """Pass the rows on: weights wait until those before them are loaded."""
    return table


def training(config: Config) -> DAG:
    """Return GRPO with given lengths."""
    dag = grpo(config, reward=some_reward)
    dag = dag.add(Node("lengths", end_there, role="rollout", after="prompts"))
    return dag.replace("rollout", after="lengths")


def hand_over(config: Config) -> DAG:
    """Return a DAG that brings the trainer's weights to the engines and does nothing else."""
    model, trainer, rollout = config.model, config.trainer, config.rollout
    roles = (
        Role("policy", partial(build_trainer, model=model, trainer=trainer, rollout=rollout)),
        Role("rollout", partial(build_engine, model=model, rollout=rollout)),
    )
    nodes = (
        Node("begin", begin, role="rollout"),
        Node("weights", publish_weights, role="policy", after="begin"),
        Node("load_weights", load_weights, role="rollout", after="weights", rows=Rows.REPLICATED),
    )
    return DAG(roles, nodes)


def overrides(
    folder: Path, url: Path, size: Size, steps: int, workers: int, placement: str
) -> Sequence[str]:
    """Return what a run of the lab is told besides its cluster's address."""
    return [
        f"run.url={url}",
        f"run.steps={steps}",
        f"data.url={folder}/{size.name}.parquet",
        "data.prepare=null",
        f"data.batch_size={size.prompts}",
        f"model.path={folder}/{size.name}",
        f"cluster.workers={workers}",
        f"cluster.placement={placement}",
        "rollout.engine=transformers",
        f"rollout.n={GROUP}",
        f"rollout.max_response_length={size.longest}",
        "rollout.work_stealing=false",
        f"algorithm.minibatches={MINIBATCHES}",
        "checkpoint.every=0",
        "validation.url=null",
        "validation.test_url=null",
        "observe.progress=false",
    ]
