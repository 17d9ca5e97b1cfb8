"""Turns of episodes that were scored: whose they are, in what order they were taken, and what each
was rewarded with.

Shapes: R rows, S turns of them, K tokens that the policy wrote in these turns. An episode may have
several rows: one for each agent that takes part, and one more wherever an agent's history was
rewritten (a segment). The segments of one agent in one episode are a *part*. Statistics count parts
or turns and never rows, so that they do not depend on how a part is cut into segments.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from siirl_dask.algorithms.advantages import check_shapes


@dataclass(frozen=True, kw_only=True, slots=True)
class EpisodeRows:
    """R rows of scored episodes, in complete groups. ValueError when the shapes differ."""

    row_ids: Tensor
    """[R] int64 number of each row: the segments of a part, and the agents of a round, follow each
    other in this order, whatever the order of rows here."""
    group_ids: Tensor
    """[R] int64 number of the prompt that the episode began with."""
    episode_ids: Tensor
    """[R] int64 number of the episode; different in different groups."""
    agents: Tensor
    """[R] int64 number of the agent that wrote the row: the same agent, the same number. 0 with
    one agent."""
    parts: Tensor
    """[R] int64 number of the part: rows that share it are segments of one agent's part of one
    episode."""

    @staticmethod
    def empty() -> EpisodeRows:
        """Return no rows, for a trial of a function of rows."""
        ids = torch.zeros(0, dtype=torch.int64)
        return EpisodeRows(row_ids=ids, group_ids=ids, episode_ids=ids, agents=ids, parts=ids)

    def __post_init__(self) -> None:
        check_shapes(
            "[R]",
            row_ids=self.row_ids,
            group_ids=self.group_ids,
            episode_ids=self.episode_ids,
            agents=self.agents,
            parts=self.parts,
        )

    def __len__(self) -> int:
        return len(self.row_ids)

    def members(self) -> dict[int, list[int]]:
        """Return the rows of each part by its number, in order; parts in the order of their
        first rows.
        """
        found: dict[int, list[int]] = {}
        parts = self.parts.tolist()
        for row in self.row_ids.argsort().tolist():
            found.setdefault(parts[row], []).append(row)
        return found


@dataclass(frozen=True, kw_only=True, slots=True)
class TurnOutcomes:
    """S turns of R rows. ValueError when the shapes do not fit together."""

    rows: EpisodeRows
    offsets: Tensor
    """[R + 1] int64: row r has turns ``offsets[r]`` to ``offsets[r + 1]``, perhaps none."""
    rewards: Tensor
    """[S] float32 reward of each turn. The turns of a part sum to its reward: what an episode is
    given at its end is on its last turn."""
    states: Tensor
    """[S] int64 hash of the state that the turn was taken in; 0 where there is none."""
    lengths: Tensor
    """[S] int64 count of the turn's tokens that the loss trains on."""
    values: Tensor | None = None
    """[K] float32 value of a critic before each of these tokens, turn after turn; None when no
    node estimated them."""

    def __post_init__(self) -> None:
        check_shapes("[S]", rewards=self.rewards, states=self.states, lengths=self.lengths)
        turns = len(self.rewards)
        rows = len(self.rows)
        tokens = int(self.lengths.sum())
        if self.offsets.shape != (rows + 1,) or int(self.offsets[-1]) != turns:
            raise ValueError(
                f"offsets {list(self.offsets.shape)} end at {int(self.offsets[-1])}: expected "
                f"[{rows + 1}] for {rows} rows, and {turns}, the number of rewards"
            )
        if self.values is not None and self.values.shape != (tokens,):
            raise ValueError(
                f"values {list(self.values.shape)}: expected [{tokens}], one for each token of the "
                "turns"
            )

    @property
    def row_of_turn(self) -> Tensor:
        """[S] int64 row of each turn."""
        return torch.arange(len(self.rows), device=self.offsets.device).repeat_interleave(
            self.offsets.diff()
        )

    @property
    def token_offsets(self) -> Tensor:
        """[S + 1] int64: turn s owns tokens ``token_offsets[s]`` to ``token_offsets[s + 1]``,
        perhaps none.
        """
        return torch.cat([self.lengths.new_zeros(1), self.lengths.cumsum(0)])

    def parts(self) -> dict[int, list[int]]:
        """Return the turns of each part by its number, in the order in which they were taken."""
        offsets = self.offsets.tolist()
        return {
            part: list(chain.from_iterable(range(offsets[row], offsets[row + 1]) for row in rows))
            for part, rows in self.rows.members().items()
        }

    def rounds(self) -> list[list[list[int]]]:
        """Return the turns of each episode, round after round: the first turns of all its parts, in
        the order of their rows, then the second ones, and so on.
        """
        members = self.rows.members()
        episode_of = self.rows.episode_ids.tolist()
        episodes: dict[int, list[list[int]]] = {}
        for part, turns in self.parts().items():
            episodes.setdefault(episode_of[members[part][0]], []).append(turns)
        return [_in_rounds(parts) for parts in episodes.values()]


def _in_rounds(parts: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return the first turns of all parts, then the second ones, and so on."""
    rounds = []
    for number in range(max(len(turns) for turns in parts)):
        rounds.append([turns[number] for turns in parts if number < len(turns)])
    return rounds


@dataclass(frozen=True, kw_only=True, slots=True)
class TurnAdvantages:
    """Advantages and returns of S turns, or of their K tokens."""

    advantages: Tensor
    """[S] or [K] float32 advantages."""
    returns: Tensor
    """The same shape, float32: returns, which a critic should predict before each turn or token."""


TurnAdvantageFn = Callable[[TurnOutcomes], TurnAdvantages]
"""``TurnOutcomes -> TurnAdvantages``."""
