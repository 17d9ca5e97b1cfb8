"""Partial rollouts (Kimi k1.5, arXiv:2501.12599, section 2.6.2): responses that are generated over
several steps.

A sample gets a budget of tokens per step. One that has not ended by then stays on its worker, with
all of its group, and continues in the next step with the weights of that step. Its next token is
drawn as if it was never interrupted. A drain step finishes all samples. Unfinished rows are stored
with the rows of the step, so that a run which is resumed continues them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress

import numpy as np
import pyarrow as pa

from siirl_dask.context import Context, Reduce
from siirl_dask.errors import DataError
from siirl_dask.nodes.sampling import add_samples, build_requests, generate_all, make_requests
from siirl_dask.rollout import ContinuedRow, FinishReason, Generation, RolloutEngine, Sampling
from siirl_dask.rollout.requests import Sampled
from siirl_dask.schema import (
    FINISH_REASON,
    GROUP_ID,
    IDENTITY,
    RESPONSE_IDS,
    ROW_ID,
    TOKEN_VERSIONS,
    TOKENS,
    TYPES,
    WORKER,
    is_blob,
)
from siirl_dask.tables import filled_by_group, once_per_group, rows_where

_OLDER_STEP = 2**32  # added to the ids of unfinished rows: no row of the next step has such an id
_UNFINISHED = "unfinished"  # in the node's state
_LOGPROBS = "logprobs"
_PARTIAL_COLUMNS = {
    RESPONSE_IDS: TYPES[RESPONSE_IDS],
    TOKEN_VERSIONS: TYPES[TOKEN_VERSIONS],
    FINISH_REASON: TYPES[FINISH_REASON],
    WORKER: TYPES[WORKER],
    _LOGPROBS: pa.large_list(pa.float64()),  # no bit is lost, as it would be in float32
}
"""Columns in which a partial sample is stored, besides those of its row; FINISH_REASON is null
while it continues."""


@dataclass(slots=True)
class _PartialSample(ContinuedRow):
    """One response, as far as it is sampled."""

    worker: str = ""
    """The worker that sampled the latest tokens."""

    def result(self) -> Sampled:
        """Return the whole response, which has ended."""
        assert self.finish_reason is not None
        return Sampled(Generation(self.tokens, self.logprobs, self.finish_reason), self.worker)


@dataclass(frozen=True, slots=True)
class _UnfinishedResponse:
    """Rows and samples that continue in the next step."""

    rows: pa.Table
    samples: list[_PartialSample]


def generate_partial(
    ctx: Context, table: pa.Table, samplings: Sequence[Sampling], budget: int
) -> pa.Table:
    """Return the rows of groups whose samples have all ended by now; a sample gets ``budget``
    tokens in a step.
    """
    engine: RolloutEngine = ctx.resource
    rows, requests = make_requests(ctx, table, samplings)
    samples = [_PartialSample(request) for request in requests]
    earlier: _UnfinishedResponse | None = ctx.state.pop(_UNFINISHED, None)
    if earlier is not None:
        earlier_rows = with_older_ids(earlier.rows).select(rows.column_names).cast(rows.schema)
        rows = pa.concat_tables([rows, earlier_rows])
        samples = samples + earlier.samples
    step_budget = None if ctx.drain else budget
    running = [at for at, sample in enumerate(samples) if not sample.finished]
    requests = [samples[at].rest(step_budget) for at in running]
    costs = rows[TOKENS].take(pa.array(running, pa.int64())).to_pylist()
    generated = generate_all(ctx, requests, costs)
    for at, sampled in zip(running, generated, strict=True):
        samples[at].add(sampled.generation, engine.version)
        samples[at].worker = sampled.worker
    complete = _complete_groups(rows, samples)
    unfinished = list(compress(samples, ~complete))
    if unfinished:
        ctx.state[_UNFINISHED] = _UnfinishedResponse(rows_where(rows, ~complete), unfinished)
    ctx.log("rollout/kept_for_next_step", len(unfinished), Reduce.SUM)
    return _finished_rows(ctx, rows_where(rows, complete), list(compress(samples, complete)))


def pack_unfinished(ctx: Context) -> pa.Table:
    """Return the rows that continue in the next step with their partial samples; an empty table
    where none do.
    """
    unfinished: _UnfinishedResponse | None = ctx.state.get(_UNFINISHED)
    if unfinished is None:
        identity = {name: TYPES[name] for name in IDENTITY}
        return pa.schema(identity | _PARTIAL_COLUMNS).empty_table()
    samples = unfinished.samples
    columns = {
        RESPONSE_IDS: [sample.tokens for sample in samples],
        TOKEN_VERSIONS: [sample.versions for sample in samples],
        FINISH_REASON: [
            None if sample.finish_reason is None else str(sample.finish_reason)
            for sample in samples
        ],
        WORKER: [sample.worker for sample in samples],
        _LOGPROBS: [sample.logprobs for sample in samples],
    }
    rows = unfinished.rows
    for name, values in columns.items():
        rows = rows.append_column(name, pa.array(values, _PARTIAL_COLUMNS[name]))
    return once_per_group(rows, blob_columns(rows))


def unpack_unfinished(ctx: Context, table: pa.Table, samplings: Sequence[Sampling]) -> None:
    """Put the rows of ``pack_unfinished`` into the node's state, to be continued in the next step.

    DataError when they are not such rows.
    """
    missing = [name for name in _PARTIAL_COLUMNS if name not in table.column_names]
    if missing:
        raise DataError(f"the samples that were kept for later steps lack {missing}")
    table = filled_by_group(table, blob_columns(table))
    rows = table.drop_columns([*_PARTIAL_COLUMNS])
    requests = build_requests(ctx, rows, samplings)
    partial_rows = table.select([*_PARTIAL_COLUMNS]).cast(pa.schema(_PARTIAL_COLUMNS)).to_pylist()
    samples: list[_PartialSample] = []
    for request, row in zip(requests, partial_rows, strict=True):
        reason = row[FINISH_REASON]
        sample = _PartialSample(
            request=request,
            tokens=row[RESPONSE_IDS],
            logprobs=row[_LOGPROBS],
            versions=row[TOKEN_VERSIONS],
            finish_reason=None if reason is None else FinishReason(reason),
            worker=row[WORKER],
        )
        samples.append(sample)
    ctx.state[_UNFINISHED] = _UnfinishedResponse(rows, samples)


def blob_columns(rows: pa.Table) -> list[str]:
    """Return the names of the columns of blobs, which the rows of a group share."""
    return [column.name for column in rows.schema if is_blob(column.type)]


def with_older_ids(rows: pa.Table) -> pa.Table:
    """Return unfinished rows under row and group ids that no row of this step has."""
    for name in (ROW_ID, GROUP_ID):
        ids = pa.array(rows[name].to_numpy() + _OLDER_STEP, TYPES[name])
        rows = rows.set_column(rows.column_names.index(name), name, ids)
    return rows


def _complete_groups(
    rows: pa.Table, samples: Sequence[_PartialSample]
) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Return, for each row, whether all samples of its group have ended. [R] bool."""
    groups = rows[GROUP_ID].to_numpy()
    incomplete = [
        group for group, sample in zip(groups.tolist(), samples, strict=True) if not sample.finished
    ]
    return ~np.isin(groups, incomplete)


def _finished_rows(ctx: Context, rows: pa.Table, samples: Sequence[_PartialSample]) -> pa.Table:
    """Return the rows with the columns of their samples, which have ended."""
    engine: RolloutEngine = ctx.resource
    oldest_versions = [min(sample.versions, default=engine.version) for sample in samples]
    rows = add_samples(ctx, rows, [sample.result() for sample in samples], oldest_versions)
    versions = pa.array([sample.versions for sample in samples], TYPES[TOKEN_VERSIONS])
    return rows.append_column(TOKEN_VERSIONS, versions)
