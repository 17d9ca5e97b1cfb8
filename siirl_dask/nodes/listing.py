"""The samples of an evaluation, as a table for people."""

from __future__ import annotations

import pyarrow as pa

from siirl_dask.context import Context
from siirl_dask.nodes.measure import NO_COLUMN, ColumnPath
from siirl_dask.planner import columns
from siirl_dask.schema import (
    ANSWER,
    FINISH_REASON,
    IDENTITY,
    PROMPT,
    RESPONSE,
    REWARD,
    REWARD_PARTS,
    ROW_ID,
    DataType,
    Schema,
    fields,
    make_schema,
)

SAMPLE, SOURCE = "sample", "source"
_SAMPLED = (RESPONSE, FINISH_REASON, REWARD, REWARD_PARTS)


def listed(prompt: DataType, answer: DataType) -> Schema:
    """The columns that ``list_samples`` writes, for its node: a dataset's prompts and answers are of any type."""
    own = {SAMPLE: pa.int64(), SOURCE: pa.string()}
    return make_schema({**own, PROMPT: prompt, ANSWER: answer, **fields(*_SAMPLED)})


@columns(reads=[PROMPT, ANSWER, *_SAMPLED], more="source", passes=False)
def list_samples(ctx: Context, table: pa.Table, *, n: int, source: ColumnPath = NO_COLUMN) -> pa.Table:
    """Prompt, answer, response and reward of each row, which of the prompt's ``n`` samples it is, from 0, and its
    source; and nothing that depends on which worker made it.
    """
    given = {name: table[name] for name in (*IDENTITY, PROMPT, ANSWER, *_SAMPLED)}
    given[SAMPLE] = pa.array(table[ROW_ID].to_numpy() % n, pa.int64())
    given[SOURCE] = pa.array(source.texts(table), pa.string())
    return pa.table(given)
