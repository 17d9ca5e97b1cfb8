"""Tells which rows are one episode, for nodes that count episodes and not rows.

An episode has several rows where its history was rewritten (``segment``) or where several agents speak (``agent``). The
rows of one episode *and agent* are one sequence: it has one reward, the sum of its rows', and one length. A group's
statistics are over sequences of one agent (Dr. MAS, arXiv:2602.08847). In a table without the column ``episode_id``
each row is a sequence.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from math import fsum

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from torch import Tensor

from siirl_dask.context import Context
from siirl_dask.errors import PeerError
from siirl_dask.nodes.packed_table import Flags, valid_rows, values
from siirl_dask.schema import AGENT, EPISODE_ID, GROUP_ID, MINIBATCH, ROW_ID, SEGMENT
from siirl_dask.training import EpisodeSpans

EPISODE = (EPISODE_ID, SEGMENT, AGENT)
"""Columns that tell the episode of a row: optional in the contract of a node that counts episodes."""
Ints = NDArray[np.int64]
_PLACE = np.dtype([(name, "<i8") for name in (MINIBATCH, EPISODE_ID, AGENT, ROW_ID, "tokens")])


@dataclass(frozen=True, slots=True)
class Episodes:
    """The sequences of a table whose episodes are whole: R rows of E sequences."""

    of_row: Tensor | None
    """[R] int64, index of each row's sequence; None where each row is one."""
    order: Tensor
    """[R] int64, the rows sequence after sequence, each in the order of its row ids."""
    ends: Tensor
    """[E] int64, index in ``order`` of each sequence's last row."""

    def sums(self, numbers: Tensor) -> Tensor:
        """Add the rows' numbers up, in float64 where they are of floating point. [R] -> [E], of their type."""
        if self.of_row is None:
            return numbers
        wide = numbers.double() if numbers.is_floating_point() else numbers
        return wide.new_zeros(len(self.ends)).index_add_(0, self.of_row, wide).to(numbers.dtype)

    def last(self, numbers: Tensor) -> Tensor:
        """Return the number of each sequence's last row. [R] -> [E]."""
        return numbers if self.of_row is None else numbers[self.order[self.ends]]

    def spread(self, numbers: Tensor) -> Tensor:
        """Give each row the number of its sequence. [E] -> [R]."""
        return numbers if self.of_row is None else numbers[self.of_row]

    def end_to_end(self, table: pa.Table) -> pa.Table:
        """Return the rows sequence after sequence."""
        return table if self.of_row is None else table.take(self.order.numpy())

    def put_back(self, column: pa.Array) -> pa.Array:
        """Return a column of ``end_to_end`` in the order of the table's rows."""
        return column if self.of_row is None else column.take(self.order.argsort().numpy())

    def offsets(self, rows: Tensor) -> Tensor:
        """Return where the tokens of each sequence begin, of rows that lie ``end_to_end``. [R + 1] -> [E + 1]."""
        return rows if self.of_row is None else torch.cat([rows[:1], rows[self.ends + 1]])

    def rows(self) -> Iterator[list[int]]:
        """Yield the rows of each sequence, in the order of their row ids."""
        begin = 0
        for end in (self.ends + 1).tolist():
            yield self.order[begin:end].tolist()
            begin = end

    def begins(self, sequences: Tensor) -> Tensor:
        """Return where the sequence of each row begins, of rows that lie ``end_to_end``. [E + 1] -> [R]."""
        return sequences[:-1] if self.of_row is None else sequences[self.of_row[self.order]]


def episodes_of(table: pa.Table) -> Episodes:
    """Return the sequences of a table."""
    if EPISODE_ID not in table.column_names:
        rows = torch.arange(table.num_rows)
        return Episodes(None, rows, rows)
    keys = np.stack([table[EPISODE_ID].to_numpy(), numbered(agents_of(table))])
    of_row = np.unique(keys, axis=1, return_inverse=True)[1].reshape(-1)
    order = np.lexsort((table[ROW_ID].to_numpy(), of_row))
    ends = np.cumsum(np.bincount(of_row)) - 1 if len(of_row) else np.zeros(0, np.int64)
    return Episodes(*(torch.from_numpy(part.astype(np.int64)) for part in (of_row, order, ends)))


def reward_sums(episodes: Episodes, rewards: Sequence[float | None]) -> list[float | None]:
    """Return the reward of each sequence: the sum of its rows', None where one has none. [R] -> [E]."""
    if episodes.of_row is None:
        return list(rewards)
    parts = ([rewards[row] for row in rows] for rows in episodes.rows())
    return [None if None in own else fsum(reward for reward in own if reward is not None) for own in parts]


def groups_of(table: pa.Table) -> Tensor:
    """Return the number of the group that each row is compared in: its prompt's, of each agent another. [R] int64."""
    groups: Tensor = values(table[GROUP_ID])
    if EPISODE_ID not in table.column_names or AGENT not in table.column_names:
        return groups
    agents = numbered(agents_of(table))
    return groups * (int(agents.max(initial=0)) + 1) + torch.from_numpy(agents)


def whole_episodes(table: pa.Table, *names: str) -> Flags:
    """Return a flag for each row of a sequence whose rows have no null in the named columns. [R]."""
    flags = valid_rows(table, *names)
    of_row = episodes_of(table).of_row
    if of_row is None:
        return flags
    broken = np.zeros(table.num_rows, np.bool_)
    broken[of_row.numpy()[~flags]] = True
    whole: Flags = ~broken[of_row.numpy()]
    return whole


def first_rows(table: pa.Table) -> int:
    """Count the sequences that begin in this table: over all workers these are all, however rows are divided."""
    if EPISODE_ID not in table.column_names or SEGMENT not in table.column_names:
        return int(table.num_rows)
    return int((table[SEGMENT].to_numpy() == 0).sum())


@dataclass(frozen=True, slots=True)
class Places:
    """Where each row stands in its sequence, whose rows may be on other workers as well. [R] each."""

    spans: EpisodeSpans
    last: Tensor
    """bool, True for the last row of a sequence."""


def places_of(ctx: Context, table: pa.Table, lengths: Tensor) -> Places:
    """Return the places of rows with ``lengths`` tokens, [R], in their sequences.

    All workers of the role must call it, with tables of the same columns. Rows of different mini-batches are apart.
    """
    own = np.zeros(table.num_rows, _PLACE)
    own[EPISODE_ID], own[ROW_ID], own["tokens"] = (
        table[EPISODE_ID].to_numpy(),
        table[ROW_ID].to_numpy(),
        lengths.numpy(),
    )
    own[AGENT] = _hashed(agents_of(table))
    if MINIBATCH in table.column_names:
        own[MINIBATCH] = table[MINIBATCH].to_numpy()
    messages = [_read_places(message) for message in ctx.all_gather(own.tobytes())]
    first = sum(map(len, messages[: ctx.rank.rank]))
    everywhere = _places(np.concatenate(messages))
    starts, totals, last = (torch.from_numpy(part[first : first + len(own)]) for part in everywhere)
    return Places(EpisodeSpans(starts, totals), last)


def _places(rows: NDArray[np.void]) -> tuple[Ints, Ints, Flags]:
    """Return for each row the tokens before it in its sequence, those of the sequence, and whether it is the last."""
    order = np.lexsort((rows[ROW_ID], rows[AGENT], rows[EPISODE_ID], rows[MINIBATCH]))
    keys, tokens = rows[[MINIBATCH, EPISODE_ID, AGENT]][order], rows["tokens"][order]
    begins = np.concatenate([np.ones(min(1, len(rows)), np.bool_), keys[1:] != keys[:-1]])
    sequence, before = np.cumsum(begins) - 1, np.cumsum(tokens) - tokens
    totals = np.zeros(int(begins.sum()), np.int64)
    np.add.at(totals, sequence, tokens)
    starts, lengths, last = np.empty(len(rows), np.int64), np.empty(len(rows), np.int64), np.empty(len(rows), np.bool_)
    starts[order] = before - before[begins][sequence]
    lengths[order] = totals[sequence]
    last[order] = np.concatenate([begins[1:], np.ones(min(1, len(rows)), np.bool_)])
    return starts, lengths, last


def _read_places(message: bytes) -> NDArray[np.void]:
    """Return the rows in a worker's message. PeerError where it holds none."""
    if len(message) % _PLACE.itemsize:
        raise PeerError(f"received {len(message)} bytes for the places of rows, expected {_PLACE.itemsize} for each")
    rows: NDArray[np.void] = np.frombuffer(message, _PLACE)
    if len(rows) and not 0 <= rows["tokens"].min() <= rows["tokens"].max() < 2**40:
        raise PeerError(f"received rows of {rows['tokens'].min()} to {rows['tokens'].max()} tokens")
    return rows


def agents_of(table: pa.Table) -> list[str]:
    """Return the agent of each row; empty where there is none."""
    if AGENT not in table.column_names:
        return [""] * table.num_rows
    return [agent or "" for agent in table[AGENT].to_pylist()]


def numbered(agents: Sequence[str]) -> Ints:
    """Number the agents by their names in alphabetical order. [R]."""
    number = {agent: at for at, agent in enumerate(sorted({*agents}))}
    return np.array([number[agent] for agent in agents], np.int64)


def _hashed(agents: Sequence[str]) -> Ints:
    """Return a number for each agent's name that is the same on all workers. [R]."""
    number = {name: blake2b(name.encode(), digest_size=8).digest() for name in {*agents}}
    return np.array([int.from_bytes(number[name], "little", signed=True) for name in agents], np.int64)
