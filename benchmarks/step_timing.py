"""GRPO whose generation, log-probs and update run under torch's profiler in every other step:
see step_parts.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import wraps
from typing import Any

import pyarrow as pa
from torch.profiler import ProfilerActivity, profile

from siirl_dask import grpo
from siirl_dask.config import Config
from siirl_dask.context import Context
from siirl_dask.nodes import generate, policy_logprobs, update_policy
from siirl_dask.planner import DAG

PYTHON = "python"
"""Metrics ``python/NODE`` have the share of a node's seconds outside of torch's operators."""


def is_profiled(step: int) -> bool:
    return step % 2 == 1


def profiled(fn: Callable[..., pa.Table], node: str, name: str) -> Callable[..., pa.Table]:
    """Return ``fn``, which is profiled in some steps and then logs its metric."""

    @wraps(fn)
    def call(ctx: Context, table: pa.Table, **options: Any) -> pa.Table:
        if not is_profiled(ctx.step):
            return fn(ctx, table, **options)
        began = time.perf_counter()
        with profile(activities=[ProfilerActivity.CPU]) as seen:
            result = fn(ctx, table, **options)
        seconds = time.perf_counter() - began
        ctx.log(f"{PYTHON}/{node}", 1 - operator_seconds(seen) / seconds)
        return result

    # workers import it by its name
    call.__module__, call.__name__, call.__qualname__ = (__name__, name, name)
    return call


def operator_seconds(seen: profile) -> float:
    """Return the seconds inside operators, without the ranges that Python opens around them."""
    return (
        sum(each.self_cpu_time_total for each in seen.key_averages() if not each.is_user_annotation)
        / 1e6
    )


profiled_generate = profiled(generate, "rollout", "profiled_generate")
profiled_logprobs = profiled(policy_logprobs, "old_logprobs", "profiled_logprobs")
profiled_update = profiled(update_policy, "update", "profiled_update")


def profiled_grpo(config: Config) -> DAG:
    functions = {
        "rollout": profiled_generate,
        "old_logprobs": profiled_logprobs,
        "update": profiled_update,
    }
    dag = grpo(config)
    for node, fn in functions.items():
        dag = dag.replace(node, fn=fn)
    return dag
