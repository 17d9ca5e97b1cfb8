"""The same completions in the layouts that the two sides take: packed, and padded at both ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from siirl_dask.training import PackedRows, TrainBatch


@dataclass(frozen=True, kw_only=True, slots=True)
class Rows:
    """R rows of tokens, each a prompt and a response, and what a loss is told of them."""

    prompts: Sequence[Sequence[int]]
    responses: Sequence[Sequence[int]]
    advantages: Tensor
    """[R] float32."""
    old_logprobs: Sequence[Tensor] = ()
    """Log-probs under the policy that sampled: one float32 tensor [length of the response] a
    row."""
    reference_logprobs: Sequence[Tensor] = ()
    """Log-probs under the reference policy, shaped like ``old_logprobs``."""

    def __len__(self) -> int:
        return len(self.prompts)

    @property
    def lengths(self) -> list[int]:
        """Lengths of the responses, in tokens."""
        return [len(response) for response in self.responses]

    def first(self, count: int) -> Rows:
        """The first ``count`` rows."""
        return Rows(
            prompts=self.prompts[:count],
            responses=self.responses[:count],
            advantages=self.advantages[:count],
            old_logprobs=self.old_logprobs[:count],
            reference_logprobs=self.reference_logprobs[:count],
        )


def packed_tokens(rows: Rows) -> PackedRows:
    texts = [
        [*prompt, *response] for prompt, response in zip(rows.prompts, rows.responses, strict=True)
    ]
    return PackedRows(
        tokens=torch.tensor([token for text in texts for token in text]),
        offsets=torch.tensor([0, *map(len, texts)]).cumsum(0),
        prompt_lengths=torch.tensor([len(prompt) for prompt in rows.prompts]),
    )


def packed(rows: Rows) -> TrainBatch:
    """Pack the rows as our trainers take them, with the old log-probs as those that the engine
    reported.
    """
    old = torch.cat(list(rows.old_logprobs))
    return TrainBatch(
        rows=packed_tokens(rows),
        old_logprobs=old,
        advantages=rows.advantages.repeat_interleave(torch.tensor(rows.lengths)),
        rollout_logprobs=old,
        reference_logprobs=torch.cat(list(rows.reference_logprobs)),
    )


def padded(rows: Rows, pad_token: int) -> dict[str, Tensor]:
    """Pad the rows as TRL's ``GRPOTrainer`` hands them to its loss: prompts on the left,
    completions on the right.
    """
    prompts, completions = (
        [torch.tensor(ids) for ids in side] for side in (rows.prompts, rows.responses)
    )

    def side_by_side(values: Sequence[Tensor], fill: float, side: str) -> Tensor:
        return pad_sequence(list(values), batch_first=True, padding_value=fill, padding_side=side)

    return {
        "prompt_ids": side_by_side(prompts, pad_token, "left"),
        "prompt_mask": side_by_side([torch.ones_like(ids) for ids in prompts], 0, "left"),
        "completion_ids": side_by_side(completions, pad_token, "right"),
        "completion_mask": side_by_side([torch.ones_like(ids) for ids in completions], 0, "right"),
        "advantages": rows.advantages,
        "old_per_token_logps": side_by_side(rows.old_logprobs, 0.0, "right"),
        "ref_per_token_logps": side_by_side(rows.reference_logprobs, 0.0, "right"),
    }
