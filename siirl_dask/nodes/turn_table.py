"""Reads whose rows a table holds, and the turns in them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch import Tensor

from siirl_dask.algorithms import EpisodeRows
from siirl_dask.errors import DataError
from siirl_dask.nodes.episodes import name_numbers, row_agents
from siirl_dask.nodes.packed_table import Flags, one_chunk, response_mask, valid_rows, values
from siirl_dask.schema import EPISODE_ID, GROUP_ID, RESPONSE_IDS, REWARD, ROW_ID, SEGMENT, TURNS


def scored_episodes(table: pa.Table) -> Flags:
    """Return a flag for each row of an episode whose rows all have a reward. [R]."""
    valid = valid_rows(table, [REWARD])
    if EPISODE_ID not in table.column_names or not table.num_rows:
        return valid
    episodes = table[EPISODE_ID].to_numpy()
    whole: Flags = ~np.isin(episodes, episodes[~valid])
    return whole


def agent_names(table: pa.Table) -> tuple[list[str], Tensor]:
    """Return the names of the agents in alphabetical order, and the number of each row's agent. [R] int64.

    Without the column, and where it is null, the name is empty.
    """
    agents = row_agents(table)
    return sorted({*agents}) or [""], torch.from_numpy(name_numbers(agents))


def episode_rows(table: pa.Table) -> EpisodeRows:
    """Return the rows of a table as advantages see them.

    A row of segment 0 begins a part; rows of the same episode and agent with other segments, in the order of row ids,
    go on with it.
    """
    row_ids = values(table[ROW_ID])
    episode_ids = values(table[EPISODE_ID]) if EPISODE_ID in table.column_names else row_ids
    _, agents = agent_names(table)
    segments = table[SEGMENT].to_pylist() if SEGMENT in table.column_names else [0] * table.num_rows
    parts, newest = [0] * table.num_rows, -1
    part_of: dict[tuple[int, int], int] = {}
    whose = list(zip(episode_ids.tolist(), agents.tolist(), strict=True))
    for row in row_ids.argsort().tolist():
        if not segments[row] or whose[row] not in part_of:
            newest += 1
            part_of[whose[row]] = newest
        parts[row] = part_of[whose[row]]
    return EpisodeRows(
        row_ids=row_ids,
        group_ids=values(table[GROUP_ID]),
        episode_ids=episode_ids,
        agents=agents,
        parts=torch.tensor(parts, dtype=torch.int64),
    )


@dataclass(frozen=True, slots=True)
class TableTurns:
    """The S turns of a table of R rows, whose responses have N tokens. K tokens are in turns and learned from."""

    offsets: Tensor
    """[R + 1] int64: row r has turns ``offsets[r]`` to ``offsets[r + 1]``."""
    rewards: Tensor
    """[S] float64 reward of each turn as its environment gave it."""
    states: Tensor
    """[S] int64."""
    token_offsets: Tensor
    """[R + 1] int64 of response tokens."""
    turn_of_token: Tensor
    """[N] int64: turn of each response token, over all rows; -1 for tokens of none, or that are not learned from."""

    @property
    def in_turns(self) -> Tensor:
        """[N] bool: True for the K tokens."""
        return self.turn_of_token >= 0

    @property
    def lengths(self) -> Tensor:
        """[S] int64 count of the tokens of each turn that are learned from."""
        return self.turn_of_token[self.in_turns].bincount(minlength=len(self.rewards))

    @property
    def numbers(self) -> Tensor:
        """[N] int32: the turn's number within its row; -1 for tokens of none."""
        first = self.offsets[:-1].repeat_interleave(self.token_offsets.diff())
        return torch.where(self.in_turns, self.turn_of_token - first, -1).int()


def turns_of(table: pa.Table) -> TableTurns:
    """Return the turns of a table. Without the column ``turns`` each row is one turn, with reward 0 and no state.

    DataError for spans that are not within the response one after the other, and for a token that is learned from and
    in no turn.
    """
    mask, token_offsets = response_mask(table)
    rows = table.num_rows
    if TURNS not in table.column_names:
        row_of_token = torch.arange(rows).repeat_interleave(token_offsets.diff())
        alone = torch.where(mask, row_of_token, -1)
        return TableTurns(
            torch.arange(rows + 1), torch.zeros(rows).double(), torch.zeros(rows).long(), token_offsets, alone
        )
    spans = one_chunk(table[TURNS])
    if spans.null_count:
        raise DataError(f"{TURNS!r} has {spans.null_count} null rows: expected lists, empty ones where there is none")
    ends = spans.offsets.to_numpy().astype(np.int64)
    offsets, flat = torch.from_numpy(ends - ends[0]), spans.flatten()
    starts, stops, states = (_numbers(flat, name, torch.int64) for name in ("start", "stop", "state"))
    row_of_turn = torch.arange(rows).repeat_interleave(offsets.diff())
    first, last = token_offsets[:-1][row_of_turn], token_offsets[1:][row_of_turn]
    starts, stops = starts + first, stops + first
    before = torch.cat([stops.new_zeros(min(1, len(stops))), stops[:-1]])
    if bool(((starts < torch.maximum(first, before)) | (stops < starts) | (stops > last)).any()):
        raise DataError(f"{TURNS!r}: expected spans within {RESPONSE_IDS!r}, one after the other")
    turn_of_token = torch.full((len(mask),), -1)
    for turn, (start, stop) in enumerate(zip(starts.tolist(), stops.tolist(), strict=True)):
        turn_of_token[start:stop] = turn
    if outside := int((mask & (turn_of_token < 0)).sum()):
        tokens = "1 token is" if outside == 1 else f"{outside} tokens are"
        raise DataError(f"{tokens} learned from and in none of {TURNS!r}: expected each in one")
    turn_of_token[~mask] = -1
    return TableTurns(offsets, _numbers(flat, "reward", torch.float64), states, token_offsets, turn_of_token)


def _numbers(flat: pa.StructArray, name: str, dtype: torch.dtype) -> Tensor:
    """Return a field of the turns; null is 0. [S]."""
    return torch.tensor(pc.fill_null(pc.struct_field(flat, name), 0).to_numpy(zero_copy_only=False), dtype=dtype)
