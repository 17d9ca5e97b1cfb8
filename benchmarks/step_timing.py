"""Node functions that note when they ran, and how long torch's operators took; step_parts.py puts them in a DAG."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import pyarrow as pa
from torch.profiler import ProfilerActivity, profile

from siirl_dask.context import Context
from siirl_dask.nodes import (
    draw_minibatches,
    encode_prompts,
    estimate_advantage,
    generate,
    policy_logprobs,
    score,
    update_policy,
)

FOLDER = "SIIRL_STEP_TIMING"
"""Environment variable with the folder that workers write their times to."""


def timed(fn: Callable[..., pa.Table], name: str) -> Callable[..., pa.Table]:
    """Return ``fn``, which also appends a line to the file of its worker."""

    @wraps(fn)
    def call(ctx: Context, table: pa.Table, **options: Any) -> pa.Table:
        began = time.monotonic()  # one clock for all processes of a machine
        profiled = profile(activities=[ProfilerActivity.CPU]) if ctx.step % 2 else None
        if profiled is None:
            result = fn(ctx, table, **options)
        else:
            with profiled:
                result = fn(ctx, table, **options)
        ended = time.monotonic()
        line = {"step": ctx.step, "worker": ctx.device.worker, "node": name, "began": began, "ended": ended}
        if profiled is not None:
            line["operators"] = operator_seconds(profiled)
        with Path(os.environ[FOLDER], f"{ctx.device.worker}.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
        return result

    call.__module__, call.__name__, call.__qualname__ = __name__, name, name
    return call


def operator_seconds(profiled: profile) -> float:
    """Return the seconds inside operators, without the ranges that Python opens around them."""
    events = profiled.key_averages()
    return sum(each.self_cpu_time_total for each in events if not each.is_user_annotation) / 1e6


timed_prompts = timed(encode_prompts, "timed_prompts")
timed_generate = timed(generate, "timed_generate")
timed_score = timed(score, "timed_score")
timed_logprobs = timed(policy_logprobs, "timed_logprobs")
timed_advantage = timed(estimate_advantage, "timed_advantage")
timed_minibatches = timed(draw_minibatches, "timed_minibatches")
timed_update = timed(update_policy, "timed_update")

TIMED = {
    "prompts": timed_prompts,
    "rollout": timed_generate,
    "reward": timed_score,
    "old_logprobs": timed_logprobs,
    "advantage": timed_advantage,
    "minibatches": timed_minibatches,
    "update": timed_update,
}
"""Functions by the name of GRPO's node."""
