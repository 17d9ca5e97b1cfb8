"""Samples many rows together with a causal model of transformers, without what ``generate`` does
besides.

A prompt that several rows have is computed once, keys and values stay in a cache
(``cached_attention``), and rows that have ended leave the batch. Models whose attention cannot be
replaced are left to ``generate``: ``use_decoding`` finds out which.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from siirl_dask.devices import accelerator
from siirl_dask.models.head import head_output
from siirl_dask.models.spans import EAGER, trial_length
from siirl_dask.rollout.image_prompts import PromptImages, inputs_with_images
from siirl_dask.rollout.transformers_engine.cached_attention import DECODING, PROBE, KeyValueCache
from siirl_dask.rollout.transformers_engine.decode_graphs import DecodeGraphs, GraphDecoder
from siirl_dask.rollout.transformers_engine.route_recording import RouteRecorder
from siirl_dask.rollout.transformers_engine.row_states import row_states, state_arguments

logger = logging.getLogger("siirl_dask.rollout")
ENDED = 0.25
"""Share of a batch that must have ended for the others to be copied together."""

Choose = Callable[[Tensor, NDArray[np.intp], int], tuple[Tensor, Tensor]]
"""``(logits [b, V] float32, rows [b], at)`` gives tokens and log-probs, [b] each, of rows at
position ``at`` of their responses. The logits may be written to."""


def padded(prompts: Sequence[Sequence[int]], pad_token: int) -> tuple[Tensor, Tensor]:
    """Return the prompts with padding before the shorter ones, and 1 where there is none. [B, T]
    int64 each.
    """
    width = max(map(len, prompts))
    tokens = torch.full((len(prompts), width), pad_token)
    mask = torch.zeros((len(prompts), width), dtype=torch.int64)
    for row, prompt in enumerate(prompts):
        tokens[row, width - len(prompt) :] = torch.as_tensor(prompt)
        mask[row, width - len(prompt) :] = 1
    return tokens, mask


class Decoder:
    """Some rows under way through a model with ``cached_attention``."""

    def __init__(
        self,
        model: PreTrainedModel,
        prompts: Sequence[Sequence[int]],
        pad_token: int,
        images: Sequence[PromptImages | None] = (),
    ) -> None:
        """``images`` are those of each prompt; none at all for a model or a batch without."""
        tokens, mask = padded(prompts, pad_token)
        self._model = model
        self._tokens = tokens.to(model.device)
        self._cache = KeyValueCache(mask.sum(dim=1).to(model.device), tokens.shape[1])
        self._states = row_states(model)
        self._first_mask: Tensor | None = None
        """Where the first pass has tokens; layers with states need it, and attention does not."""
        if self._states is not None and not bool(mask.all()):
            self._first_mask = mask.to(model.device)
        self._images = images if any(images) else ()
        shifts = [shown.shift if shown else 0 for shown in self._images]
        self._shifts = torch.tensor(shifts, device=model.device)

    def logits(self) -> Tensor:
        """Compute the logits of each row's next token. [B, V] float32, for the caller to write
        to.
        """
        count = self._tokens.shape[1]
        positions = self._cache.positions(count)
        if self._images and not self._cache.columns:
            given = inputs_with_images(self._model, self._tokens, positions, self._images)
            decoder = cast(Any, self._model).get_decoder()
            head = cast(Any, self._model).get_output_embeddings()
            output = decoder(**given, attention_mask=None, use_cache=False, decoding=self._cache)
            after_head = head_output(self._model.config.get_text_config())
            logits: Tensor = after_head.logits(head(output.last_hidden_state[:, -1]))
        else:
            logits = self._model(
                input_ids=self._tokens,
                position_ids=positions + self._shifts[:, None] if self._images else positions,
                attention_mask=self._first_mask,
                logits_to_keep=1,
                decoding=self._cache,
                **state_arguments(self._model, self._states),
            ).logits[:, -1]
            self._first_mask = None
        self._cache.advance(count)
        return logits.to(torch.float32)

    def append(self, tokens: Tensor) -> None:
        """Add a token to each row. [B]."""
        self._tokens = tokens[:, None]

    @property
    def has_states(self) -> bool:
        """Whether layers have states of the rows, which captured steps do not know."""
        return self._states is not None

    def continued(
        self,
        graphs: DecodeGraphs,
        of_prompt: Sequence[int],
        logits: Tensor,
        longest: int,
    ) -> GraphDecoder:
        """Return what goes on by captured steps, with up to ``longest`` tokens a row; this decoder
        is used up.

        Row r has prompt ``of_prompt[r]``; ``logits`` [B, V] float32 are those of the rows' next
        tokens.
        """
        prompts = torch.as_tensor(of_prompt, device=self._tokens.device)
        return self._cache.continued(graphs, prompts, logits, longest)

    def select(self, rows: Sequence[int] | NDArray[np.intp]) -> None:
        """Keep these rows, in this order; a row may be named several times."""
        index = accelerator.copied_to(self._tokens.device, torch.as_tensor(rows))
        self._cache.select(index)
        if self._states is not None:
            self._states.select(index)
        self._tokens = self._tokens[index]
        if self._images:
            self._shifts = self._shifts[index]


@torch.inference_mode()
def decode(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    limits: Sequence[int],
    ends: frozenset[int],
    pad_token: int,
    choose: Choose,
    images: Sequence[PromptImages | None] = (),
    recorder: RouteRecorder | None = None,
    graphs: DecodeGraphs | None = None,
    cut: Callable[[], bool] | None = None,
) -> tuple[Tensor, Tensor]:
    """Sample until each row has an end token or as many tokens as its limit, at least one; or,
    after any token, until ``cut()``.

    ``images`` are those of each prompt, if any has some; rows with the same ids and images have the
    same object. ``recorder`` has the rows' routes afterwards. With ``graphs``, rows without images
    and routes are decoded by them.

    Returns tokens and log-probs, [B, longest] each on the CPU; after its end a row holds
    meaningless ones.
    """
    shown = images if images else [None] * len(prompts)
    places: dict[tuple[tuple[int, ...], PromptImages | None], int] = {}
    of_prompt = [
        places.setdefault((tuple(prompt), of), len(places))
        for prompt, of in zip(prompts, shown, strict=True)
    ]
    prefill = Decoder(model, [ids for ids, _ in places], pad_token, [of for _, of in places])
    logits = prefill.logits()
    if recorder is not None:
        recorder.read_prompts(of_prompt, [*map(len, prompts)])
    if len(places) < len(prompts):
        logits = logits[torch.as_tensor(of_prompt, device=logits.device)]
    decoder: Decoder | GraphDecoder = prefill
    if prefill.has_states or recorder is not None or any(shown):
        graphs = None
    if graphs is not None and graphs.usable:
        decoder = prefill.continued(graphs, of_prompt, logits, max(limits))
    elif len(places) < len(prompts):
        prefill.select(of_prompt)
    is_end = np.zeros(logits.shape[1], dtype=bool)
    is_end[[end for end in ends if end < len(is_end)]] = True
    longest = np.asarray(limits)
    rows = np.arange(len(prompts))
    ended = np.zeros(len(prompts), dtype=bool)
    tokens, logprobs = [
        np.zeros((max(limits), len(prompts)), kind) for kind in (np.int64, np.float32)
    ]
    for at in range(max(limits)):
        chosen, scores = choose(logits, rows, at)
        drawn, drawn_logprobs = on_host(chosen, scores)
        tokens[at, rows] = drawn
        logprobs[at, rows] = drawn_logprobs
        ended |= is_end[drawn] | (longest[rows] <= at + 1)
        if ended.all() or (cut is not None and cut()):
            break
        decoder.append(chosen)
        if ended.mean() >= ENDED:
            left = np.flatnonzero(~ended)
            decoder.select(left)
            rows = rows[left]
            ended = ended[left]
        logits = decoder.logits()
        if recorder is not None:
            recorder.read_tokens(rows)
    return torch.from_numpy(tokens[: at + 1].T), torch.from_numpy(logprobs[: at + 1].T)


def on_host(tokens: Tensor, logprobs: Tensor) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """Return both as arrays, by one copy: for each the host would wait until the device is done.
    [B], [B].
    """
    both = torch.stack([tokens.to(torch.int32), logprobs.float().view(torch.int32)]).cpu().numpy()
    return both[0], both[1].view(np.float32)


@torch.inference_mode()
def use_decoding(model: PreTrainedModel) -> bool:
    """Replace the model's attention for ``decode``, and return whether it gives the logits of plain
    passes; if it does not, the model stays as it was.

    Tried on a short row and on one that is longer than windows, each with a token more.
    """
    rows = trial_rows(model)
    before = attention_of_text(model, None)
    # transformers' sdpa leaves soft caps out
    model.set_attn_implementation(attention_of_text(model, EAGER))
    try:
        plain = [
            model(torch.tensor([row], device=model.device), use_cache=False).logits[0, -2:].float()
            for row in rows
        ]
        expected = torch.stack(plain, dim=1)
        model.set_attn_implementation(attention_of_text(model, PROBE))
        Decoder(model, [row[:-1] for row in rows], pad_token=0).logits()
        model.set_attn_implementation(attention_of_text(model, DECODING))
        decoder = Decoder(model, [row[:-1] for row in rows], pad_token=0)
        first = decoder.logits()
        decoder.append(torch.tensor([row[-1] for row in rows], device=model.device))
        error = float((torch.stack([first, decoder.logits()]) - expected).abs().max())
        if error <= rounding(expected, model.dtype):
            return True
        reason = f"logits are off by {error:.2g}"
    except Exception as failure:
        # a model may do anything with an attention that it does not expect
        reason = f"{type(failure).__name__}: {failure}"
    logger.info(
        "%s generates with transformers' generate, which takes longer: %s",
        type(model).__name__,
        reason,
    )
    model.set_attn_implementation(before)
    return False


def trial_rows(model: PreTrainedModel) -> list[list[int]]:
    """Return two rows to try a model on: a short one, and one that is longer than windows."""
    config = model.config.get_text_config()
    longer = [token % config.vocab_size for token in range(trial_length(config))]
    shorter = [token % config.vocab_size for token in (1, 2, 3)]
    return [shorter, longer]


def attention_of_text(model: PreTrainedModel, attention: str | None) -> Any:
    """Return what gives a model's decoder an attention, and leaves that of a tower as it is;
    None: the one it has.
    """
    config = model.config
    text = config.get_text_config()
    if text is config:
        if attention:
            return attention
        return config._attn_implementation
    parts = {name: getattr(config, name) for name in config.sub_configs}
    return {
        name: attention if attention and part is text else part._attn_implementation
        for name, part in parts.items()
        if part is not None  # as sound of a Gemma 4 that hears none
    }


def rounding(logits: Tensor, dtype: torch.dtype) -> float:
    """Return the largest difference that kernels may make which add up in another order."""
    return max(1e-3, 4 * torch.finfo(dtype).eps) * max(1.0, float(logits.abs().max()))
