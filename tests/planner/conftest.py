"""The natural GRPO diamond: reward, old and reference log-probs in parallel, joined by the
advantage.
"""

from __future__ import annotations

from functools import partial

import pyarrow as pa
import pytest

from siirl_dask.planner import DAG, Node, Role, Rows, columns
from siirl_dask.schema import TYPES, fields


def build(device, rank):
    raise AssertionError("planning builds nothing")


@columns(reads=["prompt"], writes=fields("prompt_ids"), new_rows=True)
def prompts(ctx, table): ...


@columns(
    reads=["prompt_ids"], writes=fields("response_ids", "rollout_logprobs", "response"), expand="n"
)
def generate(ctx, table, *, n: int): ...


@columns(reads=["response", "answer"], writes=fields("reward"))
def score(ctx, table): ...


@columns(reads=["prompt_ids", "response_ids"], writes=fields("old_logprobs"))
def old_logprobs(ctx, table): ...


@columns(reads=["prompt_ids", "response_ids"], writes=fields("reference_logprobs"))
def reference_logprobs(ctx, table): ...


@columns(reads=["reward"], writes=fields("advantage", "minibatch"))
def estimate_advantage(ctx, table): ...


@columns(
    reads=["prompt_ids", "response_ids", "advantage", "old_logprobs", "minibatch"],
    optional=["reference_logprobs"],
)
def update(ctx, table): ...


@columns(writes=fields("parameter", "data"), new_rows=True, passes=False)
def weights(ctx, table): ...


@columns(reads=["parameter", "data"])
def load(ctx, table): ...


@pytest.fixture
def grpo() -> DAG:
    return DAG(
        (Role("rollout", build), Role("policy", build), Role("reference", build)),
        (
            Node("prompts", prompts, role="rollout"),
            Node("rollout", partial(generate, n=8), role="rollout", after="prompts"),
            Node("reward", score, role="rollout", after="rollout"),
            Node("old", old_logprobs, role="policy", after="rollout", rows=Rows.BALANCED),
            Node("ref", reference_logprobs, role="reference", after="rollout", rows=Rows.BALANCED),
            Node(
                "advantage",
                estimate_advantage,
                role="policy",
                after=("reward", "old", "ref"),
                rows=Rows.GROUPED,
                save_as="rollouts",
            ),
            Node("update", update, role="policy", after="advantage", rows=Rows.BALANCED),
            Node("weights", weights, role="policy", after="update"),
            Node("load", load, role="rollout", after="weights", rows=Rows.REPLICATED),
        ),
    )


@pytest.fixture
def source() -> pa.Schema:
    identity = {name: TYPES[name] for name in ("row_id", "group_id", "tokens")}
    return pa.schema(
        {**identity, "prompt": pa.string(), "answer": pa.string(), "level": pa.int32()}
    )
