"""Samples many rows together, several tokens of a row in a pass where drafts of them are right
(speculative decoding, arXiv:2211.17192, with drafts that are looked up).

The token at a position is a function of the row's seed, the position and the logits. A pass over a
row's last token and its draft gives the logits of each of these positions, and so the tokens that
would have been drawn one after the other: those of the draft are taken up to the first that was not
drawn, and the one that was drawn there as well. So a sample is the same with any draft.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from siirl_dask.rollout.engine import RowPasses
from siirl_dask.rollout.transformers_engine.decoding import ENDED, Decoder, on_host
from siirl_dask.rollout.transformers_engine.draft_cache import DraftCache
from siirl_dask.rollout.transformers_engine.drafts import BatchDrafts

ChooseAt = Callable[[Tensor, NDArray[np.intp], NDArray[np.intp]], tuple[Tensor, Tensor]]
"""``(logits [n, V] float32, rows [n], places [n])`` gives tokens and log-probs, [n] each, of rows
at these positions of their responses. The logits may be written to."""


class _Prompts(Decoder):
    """Prompts that are read once, before their rows go on with drafts."""

    def moved(self, lengths: Sequence[int], of_prompt: Sequence[int]) -> DraftCache:
        """Return the cache of the rows; row r has prompt ``of_prompt[r]``. This decoder is used up
        afterwards.
        """
        return DraftCache(self._cache.stored, lengths, of_prompt)


@dataclass(slots=True)
class _SampledRow:
    """A row of the batch and what it has sampled."""

    limit: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    draft: list[int] = field(default_factory=list)
    """The tokens that the pass under way tries."""
    ended: bool = False

    def take(self, drawn: Sequence[int], scores: Sequence[float], ends: frozenset[int]) -> int:
        """Append the tokens that were drawn at the places of the draft and after it, up to the
        first that is not the draft's; return how many.
        """
        for place, (token, score) in enumerate(zip(drawn, scores, strict=True)):
            self.tokens.append(token)
            self.logprobs.append(score)
            if token in ends or len(self.tokens) == self.limit:
                self.ended = True
                return place + 1
            if place < len(self.draft) and self.draft[place] != token:
                return place + 1
        return len(drawn)


@torch.inference_mode()
def decode_with_drafts(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    limits: Sequence[int],
    ends: frozenset[int],
    *,
    pad_token: int,
    choose: ChooseAt,
    drafts: BatchDrafts,
    cut: Callable[[], bool] | None = None,
) -> tuple[list[list[int]], list[list[float]], RowPasses]:
    """Sample until each row has an end token or as many tokens as its limit, at least one; or,
    after any pass, until ``cut()``.

    Returns the tokens and the log-probs of each row, and the tokens and passes after the prompts.
    """
    distinct: dict[tuple[int, ...], int] = {}
    of_prompt = [distinct.setdefault(tuple(prompt), len(distinct)) for prompt in prompts]
    reader = _Prompts(model, list(distinct), pad_token)
    logits = reader.logits()[torch.as_tensor(of_prompt, device=model.device)]
    cache = reader.moved([len(prompt) for prompt in distinct], of_prompt)
    del reader
    rows = [_SampledRow(limit) for limit in limits]
    batch = np.arange(len(rows))
    passed = 0
    draws = _PassDraws(rows, choose, ends, drafts)
    draws.take(batch, logits)
    while not all(rows[row].ended for row in batch):
        if cut is not None and cut():
            break
        under_way = np.array([not rows[row].ended for row in batch])
        if 1 - under_way.mean() >= ENDED:
            batch = batch[under_way]
            cache.select(np.flatnonzero(under_way))
        passed += int(under_way.sum())
        for row in batch:
            own = rows[row]
            room = own.limit - len(own.tokens) - 1
            own.draft = [] if own.ended else drafts.draft(int(row), room)
        logits = _pass(model, cache, [rows[row] for row in batch], pad_token)
        cache.keep(draws.take(batch, logits))
    drafts.remember()
    sampled = sum(len(row.tokens) - 1 for row in rows)
    return (
        [row.tokens for row in rows],
        [row.logprobs for row in rows],
        RowPasses(tokens=sampled, passes=passed),
    )


def _pass(
    model: PreTrainedModel,
    cache: DraftCache,
    rows: Sequence[_SampledRow],
    pad_token: int,
) -> Tensor:
    """Compute the logits after each row's last token and each token of its draft, of the rows that
    have not ended. [n, V] float32.
    """
    count = 1 + max(len(row.draft) for row in rows)
    tokens = np.full((len(rows), count), pad_token)
    wanted = np.zeros((len(rows), count), dtype=bool)
    for place, row in enumerate(rows):
        known = [row.tokens[-1], *row.draft]
        tokens[place, : len(known)] = known
        wanted[place, : len(known)] = not row.ended
    output = cast(Any, model)(
        input_ids=torch.from_numpy(tokens).to(model.device),
        position_ids=cache.begin(count, model.device),
        attention_mask=None,
        use_cache=False,
        logits_to_keep=count,
        decoding=cache,
    )
    logits: Tensor = output.logits[torch.from_numpy(wanted).to(model.device)]
    return logits.to(torch.float32)


@dataclass(frozen=True, slots=True)
class _PassDraws:
    """Draws the tokens of rows."""

    rows: Sequence[_SampledRow]
    choose: ChooseAt
    ends: frozenset[int]
    drafts: BatchDrafts

    def take(self, batch: NDArray[np.intp], logits: Tensor) -> NDArray[np.int64]:
        """Draw the tokens of a pass, and return how many of them each row of the batch takes. [B],
        [n, V] -> [B].
        """
        drawing = [row for row in batch if not self.rows[row].ended]
        counts = [1 + len(self.rows[row].draft) for row in drawing]
        begun = np.repeat([len(self.rows[row].tokens) for row in drawing], counts)
        firsts = np.cumsum(counts) - counts
        places = begun + np.arange(sum(counts)) - np.repeat(firsts, counts)
        chosen, scores = self.choose(logits, np.repeat(drawing, counts), places)
        tokens, logprobs = on_host(chosen, scores)
        taken = np.zeros(len(batch), dtype=np.int64)
        place_of_row = {int(row): place for place, row in enumerate(batch)}
        for row, first, count in zip(drawing, firsts, counts, strict=True):
            own = self.rows[row]
            drawn = tokens[first : first + count].tolist()
            more = own.take(drawn, logprobs[first : first + count].tolist(), self.ends)
            self.drafts.add(int(row), drawn[:more], drafted=len(own.draft))
            taken[place_of_row[int(row)]] = more
        return taken
