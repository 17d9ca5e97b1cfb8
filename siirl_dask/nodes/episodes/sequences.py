"""The rows of episodes: which rows belong to one episode, for nodes that count episodes and not
rows.

An episode has several rows where its history was rewritten (``segment``) or where several agents
speak (``agent``). The rows of one episode *and agent* are one sequence: it has one reward, the sum
of its rows', and one length. A group's statistics are over sequences of one agent (Dr. MAS,
arXiv:2602.08847). In a table without the column ``episode_id`` each row is a sequence.
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

EPISODE_COLUMNS = (EPISODE_ID, SEGMENT, AGENT)
"""Columns that identify the episode of a row: optional in the contract of a node that counts
episodes."""
Ints = NDArray[np.int64]
_TOKENS = "tokens"
_ROW = np.dtype([(name, "<i8") for name in (MINIBATCH, EPISODE_ID, AGENT, ROW_ID, _TOKENS)])
"""A row in the messages between workers: what identifies its sequence, and its number of tokens."""
_MAX_TOKENS = 2**40  # no row of a peer has as many


@dataclass(frozen=True, slots=True)
class Sequences:
    """The sequences of a table whose episodes are complete: R rows of E sequences."""

    of_row: Tensor | None
    """[R] int64, index of each row's sequence; None where each row is one."""
    order: Tensor
    """[R] int64, the rows sequence after sequence, each in the order of its row ids."""
    ends: Tensor
    """[E] int64, index in ``order`` of each sequence's last row."""

    def sums(self, numbers: Tensor) -> Tensor:
        """Add up the rows' numbers, in float64 where they are of floating point. [R] -> [E], of
        the same type.
        """
        if self.of_row is None:
            return numbers
        wide = numbers.double() if numbers.is_floating_point() else numbers
        return wide.new_zeros(len(self.ends)).index_add_(0, self.of_row, wide).to(numbers.dtype)

    def of_last_rows(self, numbers: Tensor) -> Tensor:
        """Return the number of each sequence's last row. [R] -> [E]."""
        if self.of_row is None:
            return numbers
        return numbers[self.order[self.ends]]

    def to_rows(self, numbers: Tensor) -> Tensor:
        """Give each row the number of its sequence. [E] -> [R]."""
        if self.of_row is None:
            return numbers
        return numbers[self.of_row]

    def sorted_table(self, table: pa.Table) -> pa.Table:
        """Return the rows sequence after sequence, each in the order of its row ids."""
        if self.of_row is None:
            return table
        return table.take(self.order.numpy())

    def unsorted_column(self, column: pa.Array) -> pa.Array:
        """Return a column of ``sorted_table`` in the order of the original table's rows."""
        if self.of_row is None:
            return column
        return column.take(self.order.argsort().numpy())

    def token_offsets(self, row_offsets: Tensor) -> Tensor:
        """Return where each sequence's tokens begin, from where those of each row of
        ``sorted_table`` do. [R + 1] -> [E + 1].
        """
        if self.of_row is None:
            return row_offsets
        return torch.cat([row_offsets[:1], row_offsets[self.ends + 1]])

    def starts_of_rows(self, token_offsets: Tensor) -> Tensor:
        """Return, for each row of ``sorted_table``, where the tokens of its sequence begin. [E +
        1] -> [R].
        """
        if self.of_row is None:
            return token_offsets[:-1]
        return token_offsets[self.of_row[self.order]]

    def rows(self) -> Iterator[list[int]]:
        """Yield the rows of each sequence, in the order of their row ids."""
        begin = 0
        for end in (self.ends + 1).tolist():
            yield self.order[begin:end].tolist()
            begin = end


def sequences_of(table: pa.Table) -> Sequences:
    """Return the sequences of a table."""
    if EPISODE_ID not in table.column_names:
        rows = torch.arange(table.num_rows)
        return Sequences(of_row=None, order=rows, ends=rows)
    keys = np.stack([table[EPISODE_ID].to_numpy(), name_numbers(row_agents(table))])
    _, inverse = np.unique(keys, axis=1, return_inverse=True)
    of_row = inverse.reshape(-1).astype(np.int64)
    order = np.lexsort((table[ROW_ID].to_numpy(), of_row)).astype(np.int64)
    lengths = np.bincount(of_row)
    ends = np.cumsum(lengths).astype(np.int64) - 1
    return Sequences(torch.from_numpy(of_row), torch.from_numpy(order), torch.from_numpy(ends))


def reward_sums(sequences: Sequences, rewards: Sequence[float | None]) -> list[float | None]:
    """Return the reward of each sequence: the sum of its rows', None where one has none. [R] ->
    [E].
    """
    if sequences.of_row is None:
        return list(rewards)
    sums: list[float | None] = []
    for rows in sequences.rows():
        valid = [reward for row in rows if (reward := rewards[row]) is not None]
        sums.append(fsum(valid) if len(valid) == len(rows) else None)
    return sums


def comparison_groups(table: pa.Table) -> Tensor:
    """Return the number of the group that each row is compared in: its prompt's, another for
    each agent. [R] int64.
    """
    groups: Tensor = values(table[GROUP_ID])
    if EPISODE_ID not in table.column_names or AGENT not in table.column_names:
        return groups
    agents = name_numbers(row_agents(table))
    agent_count = int(agents.max(initial=0)) + 1
    return groups * agent_count + torch.from_numpy(agents)


def complete_sequences(table: pa.Table, names: Sequence[str]) -> Flags:
    """Return a flag for each row of a sequence whose rows have no null in the named columns.
    [R].
    """
    valid = valid_rows(table, names)
    of_row = sequences_of(table).of_row
    if of_row is None:
        return valid
    sequence_of_row = of_row.numpy()
    # by sequence: there are no more of them than rows
    incomplete = np.zeros(table.num_rows, np.bool_)
    incomplete[sequence_of_row[~valid]] = True
    complete: Flags = ~incomplete[sequence_of_row]
    return complete


def count_first_rows(table: pa.Table) -> int:
    """Count the sequences that begin in this table: over all workers these are all, however rows
    are divided.
    """
    if EPISODE_ID not in table.column_names or SEGMENT not in table.column_names:
        return int(table.num_rows)
    return int((table[SEGMENT].to_numpy() == 0).sum())


@dataclass(frozen=True, slots=True)
class RowPositions:
    """The position of each row in its sequence, whose rows may be on other workers as well. [R]
    each.
    """

    spans: EpisodeSpans
    is_last: Tensor
    """bool, True for the last row of a sequence."""


def row_positions(ctx: Context, table: pa.Table, lengths: Tensor) -> RowPositions:
    """Return the positions of rows with ``lengths`` tokens, [R], in their sequences.

    All workers of the role must call it, with tables of the same columns. Rows of different
    mini-batches are different sequences.
    """
    own = np.zeros(table.num_rows, _ROW)
    own[EPISODE_ID] = table[EPISODE_ID].to_numpy()
    own[ROW_ID] = table[ROW_ID].to_numpy()
    own[AGENT] = _name_hashes(row_agents(table))
    own[_TOKENS] = lengths.numpy()
    if MINIBATCH in table.column_names:
        own[MINIBATCH] = table[MINIBATCH].to_numpy()
    tables = [_read_rows(message) for message in ctx.all_gather(own.tobytes())]
    first = sum(map(len, tables[: ctx.rank.rank]))
    own_rows = slice(first, first + len(own))
    starts, totals, is_last = _positions(np.concatenate(tables))
    spans = EpisodeSpans(torch.from_numpy(starts[own_rows]), torch.from_numpy(totals[own_rows]))
    return RowPositions(spans, torch.from_numpy(is_last[own_rows]))


def _positions(rows: NDArray[np.void]) -> tuple[Ints, Ints, Flags]:
    """Return for each row the tokens before it in its sequence, those of the sequence, and
    whether it is the last.
    """
    count = len(rows)
    order = np.lexsort((rows[ROW_ID], rows[AGENT], rows[EPISODE_ID], rows[MINIBATCH]))
    keys = rows[[MINIBATCH, EPISODE_ID, AGENT]][order]
    tokens = rows[_TOKENS][order]
    is_first = np.ones(count, np.bool_)
    is_first[1:] = keys[1:] != keys[:-1]
    last_in_order = np.ones(count, np.bool_)
    last_in_order[:-1] = is_first[1:]
    sequence = np.cumsum(is_first) - 1
    tokens_before = np.cumsum(tokens) - tokens
    sequence_tokens = np.zeros(int(is_first.sum()), np.int64)
    np.add.at(sequence_tokens, sequence, tokens)
    starts = np.empty(count, np.int64)
    totals = np.empty(count, np.int64)
    is_last = np.empty(count, np.bool_)
    starts[order] = tokens_before - tokens_before[is_first][sequence]
    totals[order] = sequence_tokens[sequence]
    is_last[order] = last_in_order
    return starts, totals, is_last


def _read_rows(message: bytes) -> NDArray[np.void]:
    """Return the rows in a worker's message. PeerError for a message that is not made of rows."""
    if len(message) % _ROW.itemsize:
        raise PeerError(
            f"received {len(message)} bytes for the places of rows, expected {_ROW.itemsize} for "
            "each"
        )
    rows: NDArray[np.void] = np.frombuffer(message, _ROW)
    tokens = rows[_TOKENS]
    if len(rows) and not 0 <= tokens.min() <= tokens.max() < _MAX_TOKENS:
        raise PeerError(f"received rows of {tokens.min()} to {tokens.max()} tokens")
    return rows


def row_agents(table: pa.Table) -> list[str]:
    """Return the name of each row's agent; empty where there is none."""
    if AGENT not in table.column_names:
        return [""] * table.num_rows
    return [agent or "" for agent in table[AGENT].to_pylist()]


def name_numbers(names: Sequence[str]) -> Ints:
    """Return the number of each name among the different ones in alphabetical order. [R]."""
    number_of = {name: number for number, name in enumerate(sorted({*names}))}
    return np.array([number_of[name] for name in names], np.int64)


def _name_hashes(names: Sequence[str]) -> Ints:
    """Return a number for each name that is the same on all workers. [R]."""
    digests = {name: blake2b(name.encode(), digest_size=8).digest() for name in {*names}}
    return np.array(
        [int.from_bytes(digests[name], "little", signed=True) for name in names], np.int64
    )
