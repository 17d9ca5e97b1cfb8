"""Reads the episodes, agents and turns of a table's rows."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch import Tensor

from siirl_dask.algorithms import EpisodeRows
from siirl_dask.errors import DataError
from siirl_dask.nodes.episodes.sequences import name_numbers, row_agents
from siirl_dask.nodes.packed_table import Flags, one_chunk, response_mask, valid_rows, values
from siirl_dask.schema import EPISODE_ID, GROUP_ID, RESPONSE_IDS, REWARD, ROW_ID, SEGMENT, TURNS


def scored_episodes(table: pa.Table) -> Flags:
    """Return a flag for each row of an episode whose rows all have a reward. [R]."""
    valid = valid_rows(table, [REWARD])
    if EPISODE_ID not in table.column_names or not table.num_rows:
        return valid
    episodes = table[EPISODE_ID].to_numpy()
    scored: Flags = ~np.isin(episodes, episodes[~valid])
    return scored


def agent_names(table: pa.Table) -> tuple[list[str], Tensor]:
    """Return the names of the agents in alphabetical order, and the number of each row's agent. [R]
    int64.

    Without the column, and where it is null, the name is empty.
    """
    agents = row_agents(table)
    names = sorted({*agents})
    if not names:  # a table without rows
        names = [""]
    return names, torch.from_numpy(name_numbers(agents))


def episode_rows(table: pa.Table) -> EpisodeRows:
    """Return the rows of a table as advantages see them.

    A row of segment 0 begins a part; rows of the same episode and agent with other segments belong
    to the same part, in the order of row ids.
    """
    row_ids = values(table[ROW_ID])
    episode_ids = values(table[EPISODE_ID]) if EPISODE_ID in table.column_names else row_ids
    _, agents = agent_names(table)
    segments = table[SEGMENT].to_pylist() if SEGMENT in table.column_names else [0] * table.num_rows
    parts = [0] * table.num_rows
    part_count = 0
    part_of: dict[tuple[int, int], int] = {}
    episodes_and_agents = list(zip(episode_ids.tolist(), agents.tolist(), strict=True))
    for row in row_ids.argsort().tolist():
        episode_and_agent = episodes_and_agents[row]
        if not segments[row] or episode_and_agent not in part_of:
            part_of[episode_and_agent] = part_count
            part_count += 1
        parts[row] = part_of[episode_and_agent]
    return EpisodeRows(
        row_ids=row_ids,
        group_ids=values(table[GROUP_ID]),
        episode_ids=episode_ids,
        agents=agents,
        parts=torch.tensor(parts, dtype=torch.int64),
    )


@dataclass(frozen=True, slots=True)
class TableTurns:
    """The S turns of a table of R rows, whose responses have N tokens. K tokens are in turns and
    learned from.
    """

    offsets: Tensor
    """[R + 1] int64: row r has turns ``offsets[r]`` to ``offsets[r + 1]``."""
    rewards: Tensor
    """[S] float64, the environment's reward of each turn."""
    states: Tensor
    """[S] int64."""
    token_offsets: Tensor
    """[R + 1] int64 of response tokens."""
    turn_of_token: Tensor
    """[N] int64: turn of each response token, over all rows; -1 for tokens of none, or that are
    not learned from."""

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
    """Return the turns of a table. Without the column ``turns`` each row is one turn, with reward 0
    and no state.

    DataError for spans that are not within the response one after the other, and for a token that
    is learned from and in no turn.
    """
    mask, token_offsets = response_mask(table)
    rows = table.num_rows
    if TURNS not in table.column_names:
        row_of_token = torch.arange(rows).repeat_interleave(token_offsets.diff())
        return TableTurns(
            offsets=torch.arange(rows + 1),
            rewards=torch.zeros(rows).double(),
            states=torch.zeros(rows).long(),
            token_offsets=token_offsets,
            turn_of_token=torch.where(mask, row_of_token, -1),
        )
    turns = one_chunk(table[TURNS])
    if turns.null_count:
        raise DataError(
            f"{TURNS!r} has {turns.null_count} null rows: expected lists, empty ones where there "
            "is none"
        )
    list_offsets = turns.offsets.to_numpy().astype(np.int64)
    offsets = torch.from_numpy(list_offsets - list_offsets[0])
    flat = turns.flatten()
    row_of_turn = torch.arange(rows).repeat_interleave(offsets.diff())
    row_starts = token_offsets[:-1][row_of_turn]
    row_stops = token_offsets[1:][row_of_turn]
    starts = _field(flat, "start", torch.int64) + row_starts
    stops = _field(flat, "stop", torch.int64) + row_starts
    previous_stops = torch.zeros_like(stops)
    previous_stops[1:] = stops[:-1]
    is_wrong = (
        (starts < torch.maximum(row_starts, previous_stops))
        | (stops < starts)
        | (stops > row_stops)
    )
    if bool(is_wrong.any()):
        raise DataError(f"{TURNS!r}: expected spans within {RESPONSE_IDS!r}, one after the other")
    turn_of_token = torch.full((len(mask),), -1)
    for turn, (start, stop) in enumerate(zip(starts.tolist(), stops.tolist(), strict=True)):
        turn_of_token[start:stop] = turn
    outside = int((mask & (turn_of_token < 0)).sum())
    if outside:
        tokens = "1 token is" if outside == 1 else f"{outside} tokens are"
        raise DataError(f"{tokens} learned from and in none of {TURNS!r}: expected each in one")
    turn_of_token[~mask] = -1
    return TableTurns(
        offsets=offsets,
        rewards=_field(flat, "reward", torch.float64),
        states=_field(flat, "state", torch.int64),
        token_offsets=token_offsets,
        turn_of_token=turn_of_token,
    )


def _field(turns: pa.StructArray, name: str, dtype: torch.dtype) -> Tensor:
    """Return a field of the turns; null is 0. [S]."""
    numbers = pc.fill_null(pc.struct_field(turns, name), 0)
    return torch.tensor(numbers.to_numpy(zero_copy_only=False), dtype=dtype)
