"""Responses that are generated over several steps (partial rollouts: Kimi k1.5, arXiv:2501.12599,
section 2.6.2).

A step stops by a rule (``continued/step_rules.py``): each response has got a budget of tokens, or
enough groups are whole. A response that has not ended by then stays on its worker, with all of its
group, and continues in the next step with the weights of that step. Its next token is drawn as if
it was never interrupted. A drain step finishes all responses. Unfinished rows are stored with the
rows of the step, so that a run which is resumed continues them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress

import numpy as np
import pyarrow as pa

from siirl_dask.config import RolloutConfig
from siirl_dask.context import Context, Reduce
from siirl_dask.errors import DataError
from siirl_dask.nodes.continued.response_parts import PartialSample, PartsQueue, part_length
from siirl_dask.nodes.continued.row_progress import RowProgress
from siirl_dask.nodes.continued.step_rules import StepRule, rule_of_step
from siirl_dask.nodes.sampling import (
    add_samples,
    build_requests,
    generate_all,
    make_requests,
    rollout_sampling,
    serve_named,
)
from siirl_dask.rollout import FinishReason, RolloutEngine
from siirl_dask.schema import (
    FINISH_REASON,
    GROUP_ID,
    IDENTITY,
    RESPONSE_IDS,
    ROW_ID,
    SAMPLING_SEED,
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


@dataclass(frozen=True, slots=True)
class _UnfinishedResponse:
    """Rows and samples that continue in the next step."""

    rows: pa.Table
    samples: list[PartialSample]


def generate_partial(ctx: Context, table: pa.Table, rollout: RolloutConfig) -> pa.Table:
    """Return the rows of the groups that the step takes, whose samples have all ended; the others
    stay in the node's state.
    """
    rows, requests = make_requests(ctx, table, [rollout_sampling(rollout)] * rollout.n)
    samples = [PartialSample(request) for request in requests]
    earlier: _UnfinishedResponse | None = ctx.state.pop(_UNFINISHED, None)
    if earlier is not None:
        earlier_rows = with_older_ids(earlier.rows).select(rows.column_names).cast(rows.schema)
        rows = pa.concat_tables([rows, earlier_rows])
        samples = samples + earlier.samples
    groups: list[int] = rows[GROUP_ID].to_pylist()
    seeds = rows[SAMPLING_SEED].to_pylist()
    rule = rule_of_step(ctx, rollout, groups, seeds, [*map(_progress, samples)])
    for index, sample in enumerate(samples):
        sample.budget = rule.budget_of(index)
    running = [
        index
        for index, sample in enumerate(samples)
        if not sample.finished and not sample.budget_spent
    ]
    costs: list[int] = rows[TOKENS].to_pylist()
    if rollout.window:
        part = part_length(rollout.max_response_length)
        _sample_in_parts(ctx, samples, running, costs, rule=rule, length=part)
    else:
        _sample_budgets(ctx, samples, running, costs)
    choice = rule.choose([*map(_progress, samples)])
    if rollout.window:
        ctx.log("rollout/dropped_groups", len(choice.dropped), Reduce.SUM)
    for index, group in enumerate(groups):
        if group in choice.dropped:  # begins again, with the same seed and newer weights
            samples[index] = PartialSample(samples[index].request)
    complete = np.isin(rows[GROUP_ID].to_numpy(), [*choice.taken])
    unfinished = list(compress(samples, ~complete))
    if unfinished:
        ctx.state[_UNFINISHED] = _UnfinishedResponse(rows_where(rows, ~complete), unfinished)
    ctx.log("rollout/kept_for_next_step", len(unfinished), Reduce.SUM)
    return _finished_rows(ctx, rows_where(rows, complete), list(compress(samples, complete)))


def pack_unfinished(ctx: Context, **options: object) -> pa.Table:
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


def unpack_unfinished(
    ctx: Context, table: pa.Table, *, rollout: RolloutConfig, **options: object
) -> None:
    """Put the rows of ``pack_unfinished`` into the node's state, to be continued in the next step.

    DataError when they are not such rows.
    """
    missing = [name for name in _PARTIAL_COLUMNS if name not in table.column_names]
    if missing:
        raise DataError(f"the samples that were kept for later steps lack {missing}")
    table = filled_by_group(table, blob_columns(table))
    rows = table.drop_columns([*_PARTIAL_COLUMNS])
    requests = build_requests(ctx, rows, [rollout_sampling(rollout)] * rollout.n)
    partial_rows = table.select([*_PARTIAL_COLUMNS]).cast(pa.schema(_PARTIAL_COLUMNS)).to_pylist()
    samples: list[PartialSample] = []
    for request, row in zip(requests, partial_rows, strict=True):
        reason = row[FINISH_REASON]
        sample = PartialSample(
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


def _sample_budgets(
    ctx: Context, samples: Sequence[PartialSample], running: Sequence[int], costs: Sequence[int]
) -> None:
    """Sample each of the ``running`` responses, here or at a peer, until it has ended or spent its
    budget.
    """
    engine: RolloutEngine = ctx.resource
    requests = [samples[index].rest(samples[index].budget) for index in running]
    generated = generate_all(ctx, requests, [costs[index] for index in running])
    for index, sampled in zip(running, generated, strict=True):
        samples[index].add_part(sampled, engine.version)


def _sample_in_parts(
    ctx: Context,
    samples: Sequence[PartialSample],
    running: Sequence[int],
    costs: Sequence[int],
    *,
    rule: StepRule,
    length: int,
) -> None:
    """Sample the ``running`` responses, ``length`` tokens at a time, until the rule has enough:
    first those that are under way, by the age of their first token, then by their expected cost.
    """
    engine: RolloutEngine = ctx.resource

    def urgency(index: int) -> tuple[int, int]:
        oldest = min(samples[index].versions, default=engine.version + 1)
        return oldest, -costs[index]

    queue = PartsQueue(
        samples=samples,
        order=sorted(running, key=urgency),
        rule=rule,
        length=length,
        version=lambda: engine.version,
        on_progress=ctx.device.sampled,
    )
    serve_named(ctx, queue, None)


def _progress(sample: PartialSample) -> RowProgress:
    return RowProgress(sample.finished, sample.tokens, sample.versions, sample.logprobs)


def _finished_rows(ctx: Context, rows: pa.Table, samples: Sequence[PartialSample]) -> pa.Table:
    """Return the rows with the columns of their samples, which have ended."""
    engine: RolloutEngine = ctx.resource
    oldest_versions = [min(sample.versions, default=engine.version) for sample in samples]
    rows = add_samples(ctx, rows, [sample.result() for sample in samples], oldest_versions)
    versions = pa.array([sample.versions for sample in samples], TYPES[TOKEN_VERSIONS])
    return rows.append_column(TOKEN_VERSIONS, versions)
