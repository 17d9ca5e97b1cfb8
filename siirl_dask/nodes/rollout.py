"""Sampling responses."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from siirl_dask.config import RolloutConfig
from siirl_dask.context import Context, Reduce
from siirl_dask.planner import columns
from siirl_dask.rollout import FinishReason, Generation, RolloutEngine, Sampling
from siirl_dask.schema import (
    FINISH_REASON,
    PROMPT_IDS,
    RESPONSE,
    RESPONSE_IDS,
    ROLLOUT_LOGPROBS,
    ROW_ID,
    TOKENS,
    TYPES,
    WEIGHTS_VERSION,
    WORKER,
    fields,
)

_SAMPLED = fields(RESPONSE_IDS, RESPONSE, ROLLOUT_LOGPROBS, FINISH_REASON, WEIGHTS_VERSION, WORKER)


@columns(reads=[PROMPT_IDS], writes=_SAMPLED, expand="rollout.n")
def generate(ctx: Context, table: pa.Table, *, rollout: RolloutConfig) -> pa.Table:
    """``rollout.n`` samples of each prompt; sample k of the prompt at position p is row ``p * n + k`` of group p."""
    sampling = Sampling(
        max_tokens=rollout.max_response_length,
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
    )
    return _generate(ctx, table, sampling, rollout.n)


@columns(reads=[PROMPT_IDS], writes=_SAMPLED, new_rows=True)
def generate_greedy(ctx: Context, table: pa.Table, *, rollout: RolloutConfig) -> pa.Table:
    """The most likely response to each prompt, for validation."""
    return _generate(ctx, table, Sampling(max_tokens=rollout.max_response_length, temperature=0.0), 1)


def _generate(ctx: Context, table: pa.Table, sampling: Sampling, n: int) -> pa.Table:
    engine: RolloutEngine = ctx.resource
    rows = table.take(np.repeat(np.arange(table.num_rows), n))
    row_ids = table[ROW_ID].to_numpy().repeat(n) * n + np.tile(np.arange(n), table.num_rows)
    prompts = rows[PROMPT_IDS].to_pylist()
    samples = engine.generate(prompts, [ctx.seed(row_id) for row_id in row_ids.tolist()], sampling)
    tokens = [len(prompt) + len(sample.token_ids) for prompt, sample in zip(prompts, samples, strict=True)]
    rows = rows.set_column(rows.column_names.index(ROW_ID), ROW_ID, pa.array(row_ids, pa.int64()))
    rows = rows.set_column(rows.column_names.index(TOKENS), TOKENS, pa.array(tokens, pa.int64()))
    for name, values in _sampled_columns(ctx, engine, samples).items():
        rows = rows.append_column(name, pa.array(values, TYPES[name]))
    _log(ctx, samples, tokens)
    return rows


def _sampled_columns(ctx: Context, engine: RolloutEngine, samples: Sequence[Generation]) -> dict[str, list[object]]:
    return {
        RESPONSE_IDS: [sample.token_ids for sample in samples],
        RESPONSE: [engine.tokenizer.decode(sample.token_ids, skip_special=True) for sample in samples],
        ROLLOUT_LOGPROBS: [sample.logprobs for sample in samples],
        FINISH_REASON: [str(sample.finish_reason) for sample in samples],
        WEIGHTS_VERSION: [engine.version] * len(samples),
        WORKER: [ctx.device.worker] * len(samples),
    }


def _log(ctx: Context, samples: Sequence[Generation], tokens: Sequence[int]) -> None:
    ctx.log("samples", len(samples), Reduce.SUM)
    ctx.log("tokens", sum(tokens), Reduce.SUM)
    ctx.log("response/length", [len(sample.token_ids) for sample in samples])
    ctx.log("response/truncated", [float(sample.finish_reason is FinishReason.LENGTH) for sample in samples])
