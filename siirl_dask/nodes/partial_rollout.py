"""Partial rollouts (Kimi k1.5, arXiv:2501.12599, section 2.6.2): responses that are generated over several steps.

A sample gets a budget of tokens per step. One that has not ended by then stays on its worker, with all of its group,
and continues in the next step with the weights of that step. Its next token is drawn as if it was never interrupted. A
drain step finishes all samples. What is kept is stored with the rows of the step, so that a run which is resumed goes
on with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pyarrow as pa

from siirl_dask.context import Context, Reduce
from siirl_dask.coordinator.blobs import filled_by_group, once_per_group, rows_where
from siirl_dask.errors import DataError
from siirl_dask.nodes.sampling import add_samples, generate_all, make_requests, requests_of
from siirl_dask.rollout import FinishReason, Generation, GenerationRequest, RolloutEngine, Sampling
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

_A_STEP_OLDER = 2**32  # added to the ids of kept rows: no row of the next step has such an id
_KEPT = "kept"
_LOGPROBS = "logprobs"
_SO_FAR = {name: TYPES[name] for name in (RESPONSE_IDS, TOKEN_VERSIONS, FINISH_REASON, WORKER)} | {
    _LOGPROBS: pa.large_list(pa.float64())  # to the bit
}
"""Columns of a sample that is stored before it has ended, beside those of its row; FINISH_REASON is null then."""


@dataclass(slots=True)
class _Sample:
    """One response so far."""

    request: GenerationRequest
    """The request of its first step."""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    """Version of the weights that sampled each token."""
    ended: FinishReason | None = None
    """None while the response goes on."""
    worker: str = ""
    """The worker that sampled the latest tokens."""

    def rest(self, budget: int | None) -> GenerationRequest:
        """Return the request for this step: at most ``budget`` tokens, None for all that are left."""
        first, done = self.request, len(self.tokens)
        left = first.sampling.max_tokens - done
        sampling = replace(first.sampling, max_tokens=left if budget is None else min(budget, left))
        return replace(first, prompt=[*first.prompt, *self.tokens], sampling=sampling, begun=done)

    def add(self, sampled: Sampled, version: int) -> None:
        """Append the tokens of one step, sampled with weights of ``version``."""
        part = sampled.generation
        self.tokens += part.token_ids
        self.logprobs += part.logprobs
        self.versions += [version] * len(part.token_ids)
        self.worker = sampled.worker
        if part.finish_reason is FinishReason.STOP or len(self.tokens) == self.request.sampling.max_tokens:
            self.ended = part.finish_reason

    def result(self) -> Sampled:
        """Return the whole response, which has ended."""
        assert self.ended is not None
        return Sampled(Generation(self.tokens, self.logprobs, self.ended), self.worker)


@dataclass(frozen=True, slots=True)
class _Kept:
    """Rows and samples that continue in the next step."""

    rows: pa.Table
    samples: list[_Sample]


def generate_partial(ctx: Context, table: pa.Table, samplings: Sequence[Sampling], budget: int) -> pa.Table:
    """Return the rows of groups whose samples have all ended by now; a sample gets ``budget`` tokens in a step."""
    engine: RolloutEngine = ctx.resource
    rows, requests = make_requests(ctx, table, samplings)
    samples = [_Sample(request) for request in requests]
    kept: _Kept | None = ctx.state.pop(_KEPT, None)
    if kept is not None:
        older = older_rows(kept.rows).select(rows.column_names).cast(rows.schema)
        rows, samples = pa.concat_tables([rows, older]), [*samples, *kept.samples]
    running = [at for at, sample in enumerate(samples) if sample.ended is None]
    requests = [samples[at].rest(None if ctx.drain else budget) for at in running]
    parts = generate_all(ctx, requests, rows[TOKENS].take(pa.array(running, pa.int64())).to_pylist())
    for at, sampled in zip(running, parts, strict=True):
        samples[at].add(sampled, engine.version)
    whole = _whole_groups(rows, samples)
    left = [sample for sample, is_whole in zip(samples, whole, strict=True) if not is_whole]
    if left:
        ctx.state[_KEPT] = _Kept(rows_where(rows, ~whole), left)
    ctx.log("rollout/kept_for_next_step", len(left), Reduce.SUM)
    ended = [sample for sample, is_whole in zip(samples, whole, strict=True) if is_whole]
    return _output(ctx, rows_where(rows, whole), ended)


def pack_kept(ctx: Context) -> pa.Table:
    """Return the rows that continue in the next step, with what is sampled of them; no rows where there are none."""
    kept: _Kept | None = ctx.state.get(_KEPT)
    if kept is None:
        return pa.schema([*((name, TYPES[name]) for name in IDENTITY), *_SO_FAR.items()]).empty_table()
    columns = {
        RESPONSE_IDS: [sample.tokens for sample in kept.samples],
        TOKEN_VERSIONS: [sample.versions for sample in kept.samples],
        FINISH_REASON: [None if sample.ended is None else str(sample.ended) for sample in kept.samples],
        WORKER: [sample.worker for sample in kept.samples],
        _LOGPROBS: [sample.logprobs for sample in kept.samples],
    }
    rows = kept.rows
    for name, values in columns.items():
        rows = rows.append_column(name, pa.array(values, _SO_FAR[name]))
    return once_per_group(rows, blobs_of(rows))


def unpack_kept(ctx: Context, table: pa.Table, samplings: Sequence[Sampling]) -> None:
    """Continue in the next step with rows that ``pack_kept`` has given. DataError when they are not such rows."""
    if missing := [name for name in _SO_FAR if name not in table.column_names]:
        raise DataError(f"the samples that were kept for later steps lack {missing}")
    table = filled_by_group(table, blobs_of(table))
    rows, so_far = table.drop_columns([*_SO_FAR]), table.select([*_SO_FAR]).cast(pa.schema(_SO_FAR)).to_pydict()
    ended = [None if reason is None else FinishReason(reason) for reason in so_far[FINISH_REASON]]
    requests = requests_of(ctx, rows, samplings)
    given = (so_far[RESPONSE_IDS], so_far[_LOGPROBS], so_far[TOKEN_VERSIONS], ended, so_far[WORKER])
    ctx.state[_KEPT] = _Kept(rows, [_Sample(*one) for one in zip(requests, *given, strict=True)])


def blobs_of(rows: pa.Table) -> list[str]:
    """Return the columns of blobs, which the rows of a group share."""
    return [column.name for column in rows.schema if is_blob(column.type)]


def older_rows(rows: pa.Table) -> pa.Table:
    """Return kept rows under ids that no row of this step has."""
    for name in (ROW_ID, GROUP_ID):
        ids = pa.array(rows[name].to_numpy() + _A_STEP_OLDER, TYPES[name])
        rows = rows.set_column(rows.column_names.index(name), name, ids)
    return rows


def _whole_groups(rows: pa.Table, samples: Sequence[_Sample]) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Return, for each row, whether all samples of its group have ended."""
    groups = rows[GROUP_ID].to_numpy()
    waiting = [group for group, sample in zip(groups.tolist(), samples, strict=True) if sample.ended is None]
    return ~np.isin(groups, waiting)


def _output(ctx: Context, rows: pa.Table, samples: Sequence[_Sample]) -> pa.Table:
    engine: RolloutEngine = ctx.resource
    oldest = [min(sample.versions, default=engine.version) for sample in samples]
    rows = add_samples(ctx, rows, [sample.result() for sample in samples], oldest)
    return rows.append_column(TOKEN_VERSIONS, pa.array([s.versions for s in samples], TYPES[TOKEN_VERSIONS]))
