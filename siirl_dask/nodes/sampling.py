"""The common part of nodes that sample: makes rows and requests, has them served, adds the samples' columns."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa

from siirl_dask.context import Codec, Context, Device, Reduce
from siirl_dask.coordinator.blobs import rows_at
from siirl_dask.images import Image, images_of
from siirl_dask.nodes.prompts import limits_of
from siirl_dask.rollout import FinishReason, Generation, GenerationRequest, LocalQueue, RolloutEngine, Sampling
from siirl_dask.rollout.requests import RequestMessage, Sampled, pack_sampled, read_sampled
from siirl_dask.schema import (
    FINISH_REASON,
    GROUP_ID,
    IMAGES,
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

SAMPLED = fields(
    SAMPLE_NUMBER, SAMPLING_SEED, RESPONSE_IDS, RESPONSE, ROLLOUT_LOGPROBS, FINISH_REASON, WEIGHTS_VERSION, WORKER
)
"""The columns that ``make_requests`` and ``add_samples`` add."""
EARLY = (PROMPT_IDS, RESPONSE_IDS, RESPONSE, ROLLOUT_LOGPROBS, FINISH_REASON)
"""The columns of a row that are known as soon as its response is: they go on while others are sampled."""


def make_requests(
    ctx: Context, table: pa.Table, samplings: Sequence[Sampling]
) -> tuple[pa.Table, list[GenerationRequest]]:
    """Return ``len(samplings)`` rows for each prompt, prompt after prompt, and one request for each row.

    The rows tell the number and the seed of their sample.
    """
    n = len(samplings)
    rows = rows_at(table, np.repeat(np.arange(table.num_rows), n))
    samples = np.tile(np.arange(n), table.num_rows)
    row_ids = table[ROW_ID].to_numpy().repeat(n) * n + samples
    seeds = [ctx.seed(row_id) for row_id in row_ids.tolist()]
    rows = rows.set_column(rows.column_names.index(ROW_ID), ROW_ID, pa.array(row_ids, pa.int64()))
    for name, values in ((SAMPLE_NUMBER, samples), (SAMPLING_SEED, seeds)):
        rows = rows.append_column(name, pa.array(values, TYPES[name]))
    return rows, requests_of(ctx, rows, samplings)


def requests_of(ctx: Context, rows: pa.Table, samplings: Sequence[Sampling]) -> list[GenerationRequest]:
    """Return the request of each row that ``make_requests`` has made, with its sample's element of ``samplings``.

    It shows the row's images to an engine that was built for them; to another one ``images`` is a column like others.
    """
    images = shown_images(ctx.resource, rows)
    given = (rows[name].to_pylist() for name in (PROMPT_IDS, SAMPLING_SEED, SAMPLE_NUMBER))
    return [
        GenerationRequest(prompt, seed, _within(samplings[sample], limit), images=shown)
        for prompt, seed, sample, limit, shown in zip(*given, limits_of(rows), images, strict=True)
    ]


def shown_images(engine: RolloutEngine, rows: pa.Table) -> list[tuple[Image, ...]]:
    """Return the images of each row's prompt, none for an engine of texts; rows of a group have the same objects."""
    if IMAGES not in rows.column_names or getattr(engine, "processor", None) is None:
        return [()] * rows.num_rows
    of_group: dict[int, tuple[Image, ...]] = {}
    groups = rows[GROUP_ID].to_pylist()
    for row, group in enumerate(groups):
        if group not in of_group:
            of_group[group] = images_of(rows[IMAGES][row].as_py())
    return [of_group[group] for group in groups]


def generate_all(
    ctx: Context, requests: Sequence[GenerationRequest], costs: Sequence[int], rows: pa.Table | None = None
) -> list[Sampled]:
    """Return a sample for each request, from this worker's engine or from that of a peer that ran idle.

    With ``rows``, the requests' in their order, what is sampled leaves for the next node while others are sampled.

    Requests that are expected to cost most begin first, longest prompts first among equals: rows of similar length run
    together, and the last row to end is a short one.
    """
    engine: RolloutEngine = ctx.resource
    order = sorted(
        range(len(requests)),
        key=lambda at: (requests[at].sampling.temperature, -costs[at], -len(requests[at].prompt)),
    )
    first_to_last, version = [requests[at] for at in order], engine.version
    codec = _codec(version)
    finished = _handing_over(ctx, rows, order)
    queue = (
        LocalQueue(first_to_last, finished)
        if ctx.steal_from_peers is None
        else ctx.steal_from_peers(first_to_last, codec, finished)
    )
    ctx.free_device()
    began = time.perf_counter()
    engine.serve(_Attributed(queue, ctx.device))
    busy = time.perf_counter() - began
    ctx.log("rollout/busy_seconds", busy)
    ctx.log("rollout/longest_busy_seconds", busy, Reduce.MAX)
    with ctx.device.waiting():
        sampled = queue.results()
    ctx.log("rollout/taken_over", queue.taken_over, Reduce.SUM)
    return [sample for _, sample in sorted(zip(order, sampled, strict=True), key=lambda pair: pair[0])]


def _codec(version: int) -> Codec[GenerationRequest, Sampled]:
    message = RequestMessage(version)
    return Codec(message.pack, message.read, pack_sampled, read_sampled, partial(_codec, version))


def _handing_over(ctx: Context, rows: pa.Table | None, order: Sequence[int]) -> Callable[[int, Sampled], None] | None:
    """Return what is to be done with the sample of request ``order[number]``; None where nothing is."""
    hand_over, engine = ctx.hand_over, ctx.resource
    if hand_over is None or rows is None:
        return None

    def finished(number: int, sampled: Sampled) -> None:
        hand_over(_with_samples(engine, rows.slice(order[number], 1), [sampled]))

    return finished


@dataclass(slots=True)
class _Attributed:
    """A RequestQueue whose results carry the name of the worker that made them, and count as its progress."""

    queue: Any
    device: Device
    under_way: int = 0
    """Requests that the engine has begun and not finished."""

    def next(self, limit: int, *, wait: bool) -> Sequence[tuple[Any, GenerationRequest]]:
        with self.device.waiting() if wait else nullcontext():
            requests: Sequence[tuple[Any, GenerationRequest]] = self.queue.next(limit, wait=wait)
        self._note(len(requests))
        return requests

    def complete(self, ticket: Any, result: Generation) -> None:
        self.queue.complete(ticket, Sampled(result, self.device.worker))
        self._note(-1)

    def _note(self, more: int) -> None:
        self.under_way += more
        self.device.engine_has(self.under_way)
        self.device.progress()


def _within(sampling: Sampling, limit: int | None) -> Sampling:
    """Return the parameters with at most ``limit`` tokens."""
    return sampling if limit is None else replace(sampling, max_tokens=min(limit, sampling.max_tokens))


def add_samples(
    ctx: Context, rows: pa.Table, sampled: Sequence[Sampled], versions: Sequence[int] | None = None
) -> pa.Table:
    """Add the samples' columns to the rows, and log their lengths.

    ``versions`` are the weights' versions of each row; None is the engine's.
    """
    rows = _with_samples(ctx.resource, rows, sampled, versions)
    samples = [sample.generation for sample in sampled]
    ctx.log("samples", len(samples), Reduce.SUM)
    ctx.log("tokens", sum(rows[TOKENS].to_pylist()), Reduce.SUM)
    lengths = [len(sample.token_ids) for sample in samples]
    ctx.log("response/length", lengths)
    ctx.log("response/length_std", lengths, Reduce.STD)
    ctx.log("response/truncated", [float(sample.finish_reason is FinishReason.LENGTH) for sample in samples])
    return rows


def _with_samples(
    engine: RolloutEngine, rows: pa.Table, sampled: Sequence[Sampled], versions: Sequence[int] | None = None
) -> pa.Table:
    samples = [sample.generation for sample in sampled]
    prompts = rows[PROMPT_IDS].combine_chunks().value_lengths().to_pylist()
    tokens = [prompt + len(sample.token_ids) for prompt, sample in zip(prompts, samples, strict=True)]
    columns: dict[str, Sequence[object]] = {
        RESPONSE_IDS: [sample.token_ids for sample in samples],
        RESPONSE: [engine.tokenizer.decode(sample.token_ids, skip_special=True) for sample in samples],
        ROLLOUT_LOGPROBS: [sample.logprobs for sample in samples],
        FINISH_REASON: [str(sample.finish_reason) for sample in samples],
        WEIGHTS_VERSION: [engine.version] * len(samples) if versions is None else versions,
        WORKER: [sample.worker for sample in sampled],
    }
    rows = rows.set_column(rows.column_names.index(TOKENS), TOKENS, pa.array(tokens, pa.int64()))
    for name, values in columns.items():
        rows = rows.append_column(name, pa.array(values, TYPES[name]))
    return rows
