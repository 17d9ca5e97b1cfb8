"""Responses that are generated over several steps, so that a step takes no longer than its budget of tokens.

A sample that has not ended when it has its step's tokens is kept on its worker, with all of its group, and goes on in
the next step from where it was, with the weights of then (partial rollouts: Kimi k1.5, arXiv:2501.12599, section
2.6.2). Its next token is drawn as if it had never been left. A step that drain leaves none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pyarrow as pa

from siirl_dask.context import Context, Reduce
from siirl_dask.nodes.sampling import add_samples, generate_all, make_requests
from siirl_dask.rollout import FinishReason, Generation, GenerationRequest, RolloutEngine, Sampling
from siirl_dask.rollout.requests import Sampled
from siirl_dask.schema import GROUP_ID, ROW_ID, TOKEN_VERSIONS, TOKENS, TYPES

_A_STEP_OLDER = 2**32  # added to the ids of what is kept, that no row of the next step has
_KEPT = "kept"


@dataclass(slots=True)
class _Sample:
    """One response so far."""

    request: GenerationRequest
    """As it was when it was begun."""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    """Of the weights that sampled each token."""
    ended: FinishReason | None = None
    worker: str = ""

    def rest(self, budget: int | None) -> GenerationRequest:
        """What is to be generated of it now."""
        first, done = self.request, len(self.tokens)
        left = first.sampling.max_tokens - done
        sampling = replace(first.sampling, max_tokens=left if budget is None else min(budget, left))
        return GenerationRequest([*first.prompt, *self.tokens], first.seed, sampling, begun=done)

    def add(self, sampled: Sampled, version: int) -> None:
        given = sampled.generation
        self.tokens += given.token_ids
        self.logprobs += given.logprobs
        self.versions += [version] * len(given.token_ids)
        self.worker = sampled.worker
        if given.finish_reason is FinishReason.STOP or len(self.tokens) == self.request.sampling.max_tokens:
            self.ended = given.finish_reason

    def result(self) -> Sampled:
        assert self.ended is not None
        return Sampled(Generation(self.tokens, self.logprobs, self.ended), self.worker)


@dataclass(frozen=True, slots=True)
class _Kept:
    rows: pa.Table
    samples: list[_Sample]


def generate_partial(ctx: Context, table: pa.Table, ways: Sequence[Sampling], budget: int) -> pa.Table:
    """Rows of the groups whose samples have all ended by now. ``budget``: tokens that a sample gets in a step."""
    engine: RolloutEngine = ctx.resource
    rows, requests = make_requests(ctx, table, ways)
    samples = [_Sample(request) for request in requests]
    kept: _Kept | None = ctx.state.pop(_KEPT, None)
    if kept is not None:
        rows, samples = pa.concat_tables([rows, _older(kept.rows)]), [*samples, *kept.samples]
    running = [at for at, sample in enumerate(samples) if sample.ended is None]
    requests = [samples[at].rest(None if ctx.drain else budget) for at in running]
    given = generate_all(ctx, requests, rows[TOKENS].take(running).to_pylist())
    for at, sampled in zip(running, given, strict=True):
        samples[at].add(sampled, engine.version)
    whole = _whole_groups(rows, samples)
    left = [sample for sample, is_whole in zip(samples, whole, strict=True) if not is_whole]
    if left:
        ctx.state[_KEPT] = _Kept(rows.filter(pa.array(~whole)), left)
    ctx.log("rollout/kept_for_next_step", len(left), Reduce.SUM)
    ended = [sample for sample, is_whole in zip(samples, whole, strict=True) if is_whole]
    return _output(ctx, rows.filter(pa.array(whole)), ended)


def _older(rows: pa.Table) -> pa.Table:
    for name in (ROW_ID, GROUP_ID):
        ids = pa.array(rows[name].to_numpy() + _A_STEP_OLDER, TYPES[name])
        rows = rows.set_column(rows.column_names.index(name), name, ids)
    return rows


def _whole_groups(rows: pa.Table, samples: Sequence[_Sample]) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Of each row, whether all samples of its group have ended."""
    groups = rows[GROUP_ID].to_numpy()
    waiting = [group for group, sample in zip(groups.tolist(), samples, strict=True) if sample.ended is None]
    return ~np.isin(groups, waiting)


def _output(ctx: Context, rows: pa.Table, samples: Sequence[_Sample]) -> pa.Table:
    engine: RolloutEngine = ctx.resource
    oldest = [min(sample.versions, default=engine.version) for sample in samples]
    rows = add_samples(ctx, rows, [sample.result() for sample in samples], oldest)
    return rows.append_column(TOKEN_VERSIONS, pa.array([s.versions for s in samples], TYPES[TOKEN_VERSIONS]))
