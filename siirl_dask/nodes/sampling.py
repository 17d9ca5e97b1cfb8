"""The common part of nodes that sample: builds rows and requests, runs the engine, adds the
samples' columns.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa

from siirl_dask.config import RolloutConfig
from siirl_dask.context import Context, Device, Reduce, behind
from siirl_dask.images import Image, images_of
from siirl_dask.nodes.prompts import token_limits
from siirl_dask.rollout import (
    FinishReason,
    Generation,
    GenerationRequest,
    LoadsInFlight,
    LocalQueue,
    RequestQueue,
    RolloutEngine,
    Sampling,
    processor_of,
)
from siirl_dask.rollout.engine import take_passes
from siirl_dask.rollout.requests import Sampled, request_codec
from siirl_dask.schema import (
    FINISH_REASON,
    GROUP_ID,
    IMAGES,
    PLAIN_RESPONSE,
    PROMPT_IDS,
    RESPONSE,
    RESPONSE_IDS,
    ROLLOUT_LOGPROBS,
    ROW_ID,
    SAMPLE_NUMBER,
    SAMPLING_SEED,
    TOKENS,
    TYPES,
    WEIGHTS_VERSION,
    WORKER,
    fields,
)
from siirl_dask.tables import rows_at

SAMPLED = (
    fields(SAMPLE_NUMBER, SAMPLING_SEED)
    | fields(RESPONSE_IDS, RESPONSE, PLAIN_RESPONSE, ROLLOUT_LOGPROBS)
    | fields(FINISH_REASON, WEIGHTS_VERSION, WORKER)
)
"""The columns that ``make_requests`` and ``add_samples`` add."""
EARLY_COLUMNS = (
    PROMPT_IDS,
    RESPONSE_IDS,
    RESPONSE,
    PLAIN_RESPONSE,
    ROLLOUT_LOGPROBS,
    FINISH_REASON,
)
"""The columns that the next node may get row by row, as soon as a response has ended, while
others are sampled."""


def rollout_sampling(rollout: RolloutConfig) -> Sampling:
    """Return the sampling parameters of a rollout."""
    return Sampling(
        max_tokens=rollout.max_response_length,
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        min_p=rollout.min_p,
        stop_token_ids=tuple(rollout.stop_token_ids),
    )


def greedy_sampling(rollout: RolloutConfig) -> Sampling:
    """Return the sampling parameters of a greedy response."""
    return Sampling(
        max_tokens=rollout.max_response_length,
        temperature=0.0,
        stop_token_ids=tuple(rollout.stop_token_ids),
    )


def make_requests(
    ctx: Context, table: pa.Table, samplings: Sequence[Sampling]
) -> tuple[pa.Table, list[GenerationRequest]]:
    """Return ``len(samplings)`` rows for each prompt, prompt after prompt, and one request for each
    row.

    The rows have the columns ``sample_number`` and ``sampling_seed``.
    """
    n = len(samplings)
    rows = rows_at(table, np.repeat(np.arange(table.num_rows), n))
    samples = np.tile(np.arange(n), table.num_rows)
    row_ids = table[ROW_ID].to_numpy().repeat(n) * n + samples
    seeds = [ctx.seed(row_id) for row_id in row_ids.tolist()]
    rows = rows.set_column(rows.column_names.index(ROW_ID), ROW_ID, pa.array(row_ids, pa.int64()))
    rows = rows.append_column(SAMPLE_NUMBER, pa.array(samples, TYPES[SAMPLE_NUMBER]))
    rows = rows.append_column(SAMPLING_SEED, pa.array(seeds, TYPES[SAMPLING_SEED]))
    return rows, build_requests(ctx, rows, samplings)


def build_requests(
    ctx: Context, rows: pa.Table, samplings: Sequence[Sampling]
) -> list[GenerationRequest]:
    """Return the request of each row that ``make_requests`` has made, with its sample's element of
    ``samplings``.

    A request has its row's images where the engine was built for images. For an engine of texts,
    ``images`` is a column like any other.
    """
    columns = zip(
        rows[PROMPT_IDS].to_pylist(),
        rows[SAMPLING_SEED].to_pylist(),
        rows[SAMPLE_NUMBER].to_pylist(),
        token_limits(rows),
        prompt_images(ctx.resource, rows),
        strict=True,
    )
    requests = []
    for prompt, seed, sample, limit, images in columns:
        sampling = samplings[sample]
        if limit is not None:
            sampling = replace(sampling, max_tokens=min(limit, sampling.max_tokens))
        requests.append(GenerationRequest(prompt, seed, sampling, images=images))
    return requests


def prompt_images(engine: RolloutEngine, rows: pa.Table) -> list[tuple[Image, ...]]:
    """Return the images of each row's prompt, none for an engine of texts; rows of a group have
    the same objects.
    """
    if IMAGES not in rows.column_names or processor_of(engine) is None:
        return [()] * rows.num_rows
    images_of_group: dict[int, tuple[Image, ...]] = {}
    groups = rows[GROUP_ID].to_pylist()
    for row, group in enumerate(groups):
        if group not in images_of_group:
            images_of_group[group] = images_of(rows[IMAGES][row].as_py())
    return [images_of_group[group] for group in groups]


def generate_all(
    ctx: Context,
    requests: Sequence[GenerationRequest],
    costs: Sequence[int],
    rows: pa.Table | None = None,
) -> list[Sampled]:
    """Return a sample for each request, from this worker's engine or from that of a peer that ran
    idle.

    With ``rows``, the requests' rows in the same order, each finished row is handed to the next
    node while others are sampled.

    Requests that are expected to cost most begin first, longest prompts first among equals: rows of
    similar length run together, and the last row to end is a short one.
    """

    def urgency(at: int) -> tuple[float, int, int]:
        request = requests[at]
        return request.sampling.temperature, -costs[at], -len(request.prompt)

    order = sorted(range(len(requests)), key=urgency)
    ordered_requests = [requests[at] for at in order]
    codec = request_codec(version_of_items(ctx))
    on_result = _early_rows(ctx, rows, order)
    if ctx.steal_from_peers is None:
        queue = LocalQueue(ordered_requests, on_result)
    else:
        queue = ctx.steal_from_peers(ordered_requests, codec, on_result)
    serve_named(ctx, queue, len(requests))
    with ctx.device.waiting():
        sampled = queue.results()
    ctx.log("rollout/taken_over", queue.taken_over, Reduce.SUM)
    in_request_order = dict(zip(order, sampled, strict=True))
    return [in_request_order[at] for at in range(len(requests))]


def serve_named(ctx: Context, queue: Any, own_count: int | None) -> None:
    """Serve a queue whose results are ``Sampled`` with this worker's engine, and log the seconds
    that it took and the passes of its model.

    ``own_count`` is the number of this worker's own requests, of which the device reports how many
    are done; None: the queue reports that.
    """
    ctx.free_device()
    start = time.perf_counter()
    serve(ctx, _ProgressQueue(queue, ctx.device, ctx.check_stop, own_count))
    busy_seconds = time.perf_counter() - start
    ctx.log("rollout/busy_seconds", busy_seconds)
    ctx.log("rollout/longest_busy_seconds", busy_seconds, Reduce.MAX)
    log_passes(ctx)


def serve(ctx: Context, queue: RequestQueue) -> None:
    """Serve a queue with the engine of the node's role, which loads weights that arrive meanwhile
    where the node does. TypeError for an engine that cannot.
    """
    engine: RolloutEngine = ctx.resource
    if ctx.arriving_weights is None:
        engine.serve(queue)
        return
    own = behind(engine)
    if not isinstance(own, LoadsInFlight):
        raise TypeError(
            f"{type(own).__name__} has no serve_in_flight, which rollout.in_flight needs: its "
            "EngineSpec says abilities.in_flight"
        )
    own.serve_in_flight(queue, ctx.arriving_weights)


def version_of_items(ctx: Context) -> int:
    """Return the number that workers must have in common to take over each other's rows: the
    version of their weights, or, where each loads newer ones at a time of its own, the step.
    """
    engine: RolloutEngine = ctx.resource
    if ctx.arriving_weights is None:
        return engine.version
    return ctx.step


def log_passes(ctx: Context) -> None:
    """Log the tokens that a row got in a pass of the model, of an engine that drafts tokens."""
    own = take_passes(ctx.resource)
    if own.passes:
        ctx.log("rollout/tokens_per_pass", own.tokens / own.passes, weight=own.passes)


def _early_rows(
    ctx: Context, rows: pa.Table | None, order: Sequence[int]
) -> Callable[[int, Sampled], None] | None:
    """Return the function that hands a finished row to the next node, from the index of its request
    in ``order`` and its sample; None where no node reads rows early.
    """
    hand_over = ctx.hand_over
    if hand_over is None or rows is None:
        return None
    engine: RolloutEngine = ctx.resource

    def on_result(index: int, sampled: Sampled) -> None:
        row = rows.slice(order[index], 1)
        hand_over(_with_samples(engine, row, [sampled]))

    return on_result


@dataclass(slots=True)
class _ProgressQueue:
    """A RequestQueue that adds this worker's name to each result, and reports the engine's
    progress to the device.
    """

    queue: Any
    device: Device
    check_stop: Callable[[], None]
    own_count: int | None
    """Number of this worker's own requests; None: the queue reports its progress itself."""
    running: int = 0
    """Requests that the engine has begun and not finished."""
    completed: int = 0

    def next(self, limit: int, *, wait: bool) -> Sequence[tuple[Any, GenerationRequest]]:
        waiting = self.device.waiting() if wait else nullcontext()
        with waiting:
            requests: Sequence[tuple[Any, GenerationRequest]] = self.queue.next(limit, wait=wait)
        if requests:
            self._change_running(len(requests))
        return requests

    def ended(self) -> bool:
        self.check_stop()
        return bool(self.queue.ended())

    def complete(self, ticket: Any, result: Generation) -> None:
        self.queue.complete(ticket, Sampled(result, self.device.worker))
        self.completed += 1
        if self.own_count is not None:
            self.device.sampled(self.completed, self.own_count)
        self._change_running(-1)

    def _change_running(self, change: int) -> None:
        self.running += change
        self.device.engine_has(self.running)
        self.device.progress()


def add_samples(
    ctx: Context,
    rows: pa.Table,
    sampled: Sequence[Sampled],
    versions: Sequence[int] | None = None,
) -> pa.Table:
    """Add the samples' columns to the rows, and log their lengths.

    ``versions`` are the versions of the weights that sampled each row; None means those of its
    first token, or the engine's.
    """
    rows = _with_samples(ctx.resource, rows, sampled, versions)
    samples = [sample.generation for sample in sampled]
    ctx.log("samples", len(samples), Reduce.SUM)
    ctx.log("tokens", sum(rows[TOKENS].to_pylist()), Reduce.SUM)
    lengths = [len(sample.token_ids) for sample in samples]
    ctx.log("response/length", lengths)
    ctx.log("response/length_std", lengths, Reduce.STD)
    is_truncated = [sample.finish_reason is FinishReason.LENGTH for sample in samples]
    ctx.log("response/truncated", [float(truncated) for truncated in is_truncated])
    return rows


def _with_samples(
    engine: RolloutEngine,
    rows: pa.Table,
    sampled: Sequence[Sampled],
    versions: Sequence[int] | None = None,
) -> pa.Table:
    samples = [sample.generation for sample in sampled]
    if versions is None:
        newest = engine.version
        versions = [min(sample.versions_or(newest), default=newest) for sample in samples]
    prompt_lengths = rows[PROMPT_IDS].combine_chunks().value_lengths().to_pylist()
    tokens = []
    for length, sample in zip(prompt_lengths, samples, strict=True):
        tokens.append(length + len(sample.token_ids))
    tokenizer = engine.tokenizer
    texts = [tokenizer.decode(sample.token_ids, skip_special=True) for sample in samples]
    columns: dict[str, Sequence[object]] = {
        RESPONSE_IDS: [sample.token_ids for sample in samples],
        RESPONSE: texts,
        PLAIN_RESPONSE: [tokenizer.plain_text(sample.token_ids) for sample in samples],
        ROLLOUT_LOGPROBS: [sample.logprobs for sample in samples],
        FINISH_REASON: [str(sample.finish_reason) for sample in samples],
        WEIGHTS_VERSION: versions,
        WORKER: [sample.worker for sample in sampled],
    }
    rows = rows.set_column(rows.column_names.index(TOKENS), TOKENS, pa.array(tokens, pa.int64()))
    for name, values in columns.items():
        rows = rows.append_column(name, pa.array(values, TYPES[name]))
    return rows
