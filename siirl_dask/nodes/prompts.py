"""From what the dataset holds to token ids."""

from __future__ import annotations

import logging

import pyarrow as pa

from siirl_dask.config import RolloutConfig
from siirl_dask.context import Context, Reduce
from siirl_dask.nodes.lengths import MAX_TOKENS, sampling_costs
from siirl_dask.planner import columns
from siirl_dask.rollout import RolloutEngine
from siirl_dask.schema import PROMPT, PROMPT_IDS, PROMPT_TEXT, ROW_ID, TOKENS, TYPES, fields

logger = logging.getLogger(__name__)


@columns(
    reads=[PROMPT],
    optional=[MAX_TOKENS],
    optional_at="rollout.expected_length",
    writes=fields(PROMPT_IDS, PROMPT_TEXT),
    new_rows=True,
)
def encode_prompts(
    ctx: Context, table: pa.Table, *, max_prompt_length: int, rollout: RolloutConfig | None = None
) -> pa.Table:
    """Token ids of each prompt, and what sampling from it costs (``lengths.sampling_costs``).

    A prompt of more than ``max_prompt_length`` tokens is dropped from its step and counted; the rule looks at the
    prompt alone, so it drops the same rows on any number of workers.
    """
    engine: RolloutEngine = ctx.resource
    ids = [engine.tokenizer.encode(prompt) for prompt in table[PROMPT].to_pylist()]
    for row_id, tokens in zip(table[ROW_ID].to_pylist(), ids, strict=True):
        if not tokens:
            raise ValueError(f"the prompt of row {row_id} has no tokens: the model needs at least one to go on from")
    fitting = [row for row, tokens in enumerate(ids) if len(tokens) <= max_prompt_length]
    dropped = len(ids) - len(fitting)
    ctx.log("data/dropped_prompts", dropped, Reduce.SUM)
    if dropped:
        logger.warning("step %d: dropped %d prompts of more than %d tokens", ctx.step, dropped, max_prompt_length)
        table, ids = table.take(fitting), [ids[row] for row in fitting]
    texts = [engine.tokenizer.decode(tokens, skip_special=False) for tokens in ids]
    costs = sampling_costs(table, [*map(len, ids)], rollout)
    table = table.set_column(table.column_names.index(TOKENS), TOKENS, pa.array(costs, pa.int64()))
    table = table.append_column(PROMPT_IDS, pa.array(ids, TYPES[PROMPT_IDS]))
    return table.append_column(PROMPT_TEXT, pa.array(texts, pa.string()))
