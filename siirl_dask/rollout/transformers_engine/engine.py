"""Generates with ``transformers``: no extra install, any causal model, any device that torch knows;
images for models that see them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional
from transformers import GenerationConfig, PreTrainedModel

from siirl_dask.config import ModelConfig
from siirl_dask.context import ArrivingWeights, HoldsNoGroups
from siirl_dask.devices import accelerator
from siirl_dask.errors import ConfigError, RunError
from siirl_dask.images.processor import ImageProcessor
from siirl_dask.models.loading import load_pretrained, model_class
from siirl_dask.models.number_type import torch_dtype
from siirl_dask.models.routing import Routing
from siirl_dask.rollout.base_weights import BaseWeights, MergesAdapters
from siirl_dask.rollout.continued_rows import ContinuedRow
from siirl_dask.rollout.engine import (
    FinishReason,
    Generation,
    GenerationRequest,
    RequestQueue,
    RowPasses,
    Sampling,
    Tokenizer,
    check_no_images,
    check_prompts,
    serve_all,
)
from siirl_dask.rollout.image_prompts import PromptImageReader
from siirl_dask.rollout.specs import alternatives
from siirl_dask.rollout.token_sampling import TokenSampler, as_seed
from siirl_dask.rollout.tokenizer import HuggingFaceTokenizer, load_tokenizer
from siirl_dask.rollout.transformers_engine.decode_graphs import decode_graphs
from siirl_dask.rollout.transformers_engine.decoding import decode, use_decoding
from siirl_dask.rollout.transformers_engine.draft_decoding import ChooseAt, decode_with_drafts
from siirl_dask.rollout.transformers_engine.drafts import BatchDrafts, EarlierResponses
from siirl_dask.rollout.transformers_engine.plain_generate import check_generate, generate
from siirl_dask.rollout.transformers_engine.route_recording import RouteRecorder
from siirl_dask.rollout.transformers_engine.row_states import row_states
from siirl_dask.rollout.weight_loading import WeightLoader

_WIDENED = 2**22  # most elements of a head that are in float32 at once, where the model is not


class TransformersEngine(MergesAdapters, HoldsNoGroups):
    """A RolloutEngine over a causal or image-text model of transformers, in batches of at most
    ``max_rows`` rows.
    """

    def __init__(
        self,
        model: ModelConfig,
        *,
        device: str = "cpu",
        max_rows: int = 256,
        progress: Callable[[], None] = lambda: None,
        processor: ImageProcessor | None = None,
        routing: Routing | None = None,
        draft_tokens: int = 0,
    ) -> None:
        """``progress`` is called for each token, and each weight that is loaded. Without a
        ``processor`` requests with images are refused. With ``routing`` samples have their routes.
        Up to ``draft_tokens`` tokens of a row are drafted before a pass; ConfigError for a model
        that cannot go back to fewer tokens.
        """
        self._model, tokenizer = _load(model, device)
        self.tokenizer: Tokenizer = tokenizer
        self._parameters = WeightLoader(self._model)
        self._base = BaseWeights(model.path, self._parameters)
        self._device = device
        self._max_rows = max_rows
        self._progress = progress
        self._end_tokens = tokenizer.end_tokens
        self._pad_token = next(iter([*self._end_tokens, 0]))
        # its penalties and sampling must not reach our samples
        self._model.generation_config = GenerationConfig()
        self._decodes = use_decoding(self._model)
        if not self._decodes:
            check_generate(self._model, model.path)
        if (processor is not None or routing is not None) and not self._decodes:
            raise ConfigError(
                f"model.path={model.path!r}: a {type(self._model).__name__} generates with "
                "transformers' own loop "
                "alone, which is not given images here and records no routes; take "
                f"{alternatives('transformers', lambda able: able.images and able.routes)}, or "
                "another model"
            )
        self._draft_tokens = draft_tokens
        if draft_tokens:
            self._check_drafts(model.path)
        self._earlier = EarlierResponses()
        self._passes = RowPasses()
        self.routing = routing
        self._recorder = None if routing is None else RouteRecorder(self._model, routing)
        self._graphs = None
        if self._decodes and not draft_tokens:
            self._graphs = decode_graphs(self._model, torch.device(device))
        self.processor = processor
        self._reader = None if processor is None else PromptImageReader(self._model, processor)
        self.context_length: int | None = getattr(
            self._model.config.get_text_config(), "max_position_embeddings", None
        )
        self.version = 0

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        seeds: Sequence[int],
        sampling: Sampling,
    ) -> list[Generation]:
        """Return one response per prompt, in order. ValueError for a prompt without tokens."""
        return serve_all(self, prompts, seeds, sampling)

    def stream(self, request: GenerationRequest, on_token: Callable[[int], None]) -> Generation:
        """Return the response of one request without images. ``on_token`` is called with each
        token, the end token included, as soon as it is drawn. ValueError for a prompt without
        tokens.
        """
        check_prompts([request.prompt])
        check_no_images([request])
        return self._generate_batch([request], lambda drawn: on_token(int(drawn[0])))[0]

    def serve(self, queue: RequestQueue) -> None:
        """Generate until the queue is empty, one batch after the other."""
        try:
            self._serve(queue, None)
        finally:
            if self._reader is not None:
                self._reader.forget()

    def serve_in_flight(self, queue: RequestQueue, weights: ArrivingWeights) -> None:
        """Generate until the queue is empty, and load weights that arrive between two tokens: the
        rows of the batch go on as continued ones.
        """
        assert self._reader is None, "images with weights in flight are refused before a start"
        self._serve(queue, weights)

    def _serve(self, queue: RequestQueue, weights: ArrivingWeights | None) -> None:
        while batch := queue.next(self._max_rows, wait=True):
            check_prompts([request.prompt for _, request in batch])
            if self._reader is None:
                check_no_images([request for _, request in batch])
            groups: dict[Sampling, list[tuple[Any, GenerationRequest]]] = {}
            for ticket, request in batch:
                groups.setdefault(_unlimited(request), []).append((ticket, request))
            for alike in groups.values():
                requests = [request for _, request in alike]
                if weights is None:
                    generations = self._generate_batch(requests)
                else:
                    generations = self._generate_in_flight(requests, weights)
                for (ticket, _), generation in zip(alike, generations, strict=True):
                    queue.complete(ticket, generation)

    def _generate_in_flight(
        self, requests: Sequence[GenerationRequest], weights: ArrivingWeights
    ) -> list[Generation]:
        """Generate for requests with equal sampling parameters; new weights end the batch, and what
        is left of its rows is another.
        """
        rows = [ContinuedRow(request) for request in requests]
        while under_way := [row for row in rows if not row.finished]:
            while weights.arrived():
                weights.load()
            rest = [row.rest() for row in under_way]
            generations = self._generate_batch(rest, cut=weights.arrived)
            for row, generation in zip(under_way, generations, strict=True):
                row.add(generation, self.version)
        return [row.whole() for row in rows]

    def load_weights(self, tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Copy every parameter in place. ValueError, before anything changes, if the names or
        shapes do not fit.
        """
        parameters = dict(self._model.named_parameters(remove_duplicate=False))
        weights = self._parameters.fit(tensors, version)
        with torch.no_grad():
            for name, tensor in weights:
                parameters[name].copy_(tensor)
                self._progress()
        self.version = version

    def take_passes(self) -> RowPasses | None:
        """Return the passes over rows with drafts since this was called last; None without
        drafts.
        """
        if not self._draft_tokens:
            return None
        passes = self._passes
        self._passes = RowPasses()
        return passes

    def sleep(self, *, weights_follow: bool = False) -> None:
        """Free the cache of captured steps, with these, and what torch's allocator keeps for
        later.
        """
        if self._graphs is not None:
            self._graphs.drop()
        accelerator.free_cache(self._model.device.type)

    def close(self) -> None:
        """Free the weights; the engine cannot be used any more."""
        del self._model, self._reader, self._graphs

    def _generate_batch(
        self,
        requests: Sequence[GenerationRequest],
        on_tokens: Callable[[Tensor], None] | None = None,
        cut: Callable[[], bool] | None = None,
    ) -> list[Generation]:
        """Generate for requests with equal sampling parameters, up to the longest response that
        one of them allows. ``on_tokens`` is called with the tokens of each position, those of the
        rows that have not ended; then no tokens are drafted. All rows end, after any token, where
        ``cut()`` says so.
        """
        prompts = [request.prompt for request in requests]
        limits = [request.sampling.max_tokens for request in requests]
        sampling = requests[0].sampling
        ends = self._end_tokens | {*sampling.stop_token_ids}
        seeds = np.array([as_seed(request.seed) for request in requests], dtype=np.uint64)
        begun = np.array([request.begun for request in requests], dtype=np.uint64)
        draw = TokenSampler(sampling)

        def choose(
            logits: Tensor, rows: NDArray[np.intp], at: int | NDArray[np.intp]
        ) -> tuple[Tensor, Tensor]:
            self._progress()
            drawn, logprobs = draw(logits, seeds[rows], begun[rows] + np.asarray(at, np.uint64))
            if on_tokens is not None:
                on_tokens(drawn)
            return drawn, logprobs

        shown = () if self._reader is None else self._reader.read(requests)
        if self._draft_tokens and on_tokens is None and not any(shown):
            drawn_rows, scores = self._with_drafts(requests, ends, choose, cut)
            return [
                self._cut(row, logprobs_of_row, limit, ends)
                for row, logprobs_of_row, limit in zip(drawn_rows, scores, limits, strict=True)
            ]
        if self._decodes:
            tokens, logprobs = decode(
                self._model,
                prompts,
                limits,
                ends,
                pad_token=self._pad_token,
                choose=choose,
                images=shown,
                recorder=self._recorder,
                graphs=self._graphs,
                cut=cut,
            )
        else:
            tokens, logprobs = generate(
                self._model,
                prompts,
                limits,
                ends,
                pad_token=self._pad_token,
                choose=choose,
                cut=cut,
            )
        samples = [
            self._cut(row, logprobs_of_row, limit, ends)
            for row, logprobs_of_row, limit in zip(
                tokens.tolist(), logprobs.tolist(), limits, strict=True
            )
        ]
        if self._recorder is None:
            return samples
        return [
            replace(sample, routes=self._recorder.routes(row, len(sample.token_ids)))
            for row, sample in enumerate(samples)
        ]

    def _with_drafts(
        self,
        requests: Sequence[GenerationRequest],
        ends: frozenset[int],
        choose: ChooseAt,
        cut: Callable[[], bool] | None,
    ) -> tuple[list[list[int]], list[list[float]]]:
        """Return tokens and log-probs of each row, of which several may come from one pass."""
        prompts = [request.prompt for request in requests]
        drafts = BatchDrafts(
            prompts,
            [request.begun for request in requests],
            self._earlier,
            most=self._draft_tokens,
        )
        tokens, logprobs, own = decode_with_drafts(
            self._model,
            prompts,
            [request.sampling.max_tokens for request in requests],
            ends,
            pad_token=self._pad_token,
            choose=choose,
            drafts=drafts,
            cut=cut,
        )
        before = self._passes
        self._passes = RowPasses(before.tokens + own.tokens, before.passes + own.passes)
        return tokens, logprobs

    def _check_drafts(self, path: str) -> None:
        """Raise ConfigError for a model that cannot go back to fewer tokens of a row."""
        has_states = row_states(self._model) is not None
        if self._decodes and not has_states:
            return
        why = "has layers with states of the rows, which cannot go back by some tokens"
        if not self._decodes:
            why = "generates with transformers' own loop alone"
        raise ConfigError(
            f"rollout.draft_tokens={self._draft_tokens}: model.path={path!r}, a "
            f"{type(self._model).__name__}, {why}; leave it at 0"
        )

    def _cut(
        self,
        tokens: list[int],
        logprobs: list[float],
        limit: int,
        ends: frozenset[int],
    ) -> Generation:
        """Cut a row after its end token or at its limit. RunError for a log-probability that is
        not finite.
        """
        end = next((at for at, token in enumerate(tokens[:limit]) if token in ends), None)
        length = min(len(tokens), limit)
        reason = FinishReason.LENGTH
        if end is not None:
            length = end + 1
            reason = FinishReason.STOP
        if not all(logprob > -torch.inf for logprob in logprobs[:length]):
            raise RunError(
                f"the model gives logits that are not finite (weights of version {self.version})"
            )
        return Generation(tokens[:length], logprobs[:length], reason)


def _unlimited(request: GenerationRequest) -> Sampling:
    """Return the request's sampling parameters without the number of tokens, which may differ
    within a batch.
    """
    return replace(request.sampling, max_tokens=0)


def _load(model: ModelConfig, device: str) -> tuple[PreTrainedModel, HuggingFaceTokenizer]:
    """Load model and tokenizer. ConfigError names ``model.path`` when they cannot be loaded."""
    key = f"model.path={model.path!r}"
    dtype = torch_dtype(model.dtype, torch.device(device))
    kind = model_class(model.path, key)
    network = load_pretrained(kind, model.path, dtype, key, longest_row=model.longest_row)
    tokenizer = load_tokenizer(model.path, key)
    network.to(device).eval()  # type: ignore[arg-type]  # a decorator hides its type
    if model.float32_head:
        _compute_head_in_float32(network)
    return network, tokenizer.with_options(model)


def _compute_head_in_float32(model: PreTrainedModel) -> None:
    """Let a model give logits that are products in float32 of its hidden states and its head, of
    any type.

    The weights stay as they are: a tied embedding is the same tensor, and new weights are copied
    into it. A part of the head is widened at a time, since all of it would take gigabytes.
    """
    head = model.get_output_embeddings()
    rows = max(1, _WIDENED // head.in_features)

    def forward(hidden: Tensor) -> Tensor:
        wide = hidden.float()
        logits = torch.cat(
            [functional.linear(wide, part.float()) for part in head.weight.split(rows)], dim=-1
        )
        if head.bias is not None:
            logits += head.bias.float()
        return logits

    head.forward = forward
