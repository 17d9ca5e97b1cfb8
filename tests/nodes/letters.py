"""An engine whose tokens are letters, and tables for it."""

from __future__ import annotations

from dataclasses import dataclass, field

import pyarrow as pa

from siirl_dask.rollout import FinishReason, Generation


def table(**columns):
    """Return rows with the columns, numbered from 0."""
    count = len(next(iter(columns.values())))
    ids = pa.array(range(count), pa.int64())
    identity = {"row_id": ids, "group_id": ids, "tokens": pa.array([0] * count, pa.int64())}
    return pa.table({**identity, **columns})


@dataclass
class Letters:
    """An engine whose tokens are letters. It records the prompts in the order in which they
    begin.
    """

    begun: list = field(default_factory=list)
    version = 0

    class tokenizer:
        @staticmethod
        def encode(prompt):
            return [*map(ord, prompt)]

        @staticmethod
        def decode(token_ids, *, skip_special):
            return "".join(map(chr, token_ids))

        @staticmethod
        def plain_text(token_ids):
            return None

    def serve(self, queue):
        while taken := queue.next(2, wait=True):
            for ticket, asked in taken:
                self.begun.append(self.tokenizer.decode(asked.prompt, skip_special=True))
                queue.complete(ticket, Generation([asked.seed % 1000], [-1.0], FinishReason.STOP))
