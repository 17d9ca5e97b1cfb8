"""Makes turns of episodes for tests, and permutes and cuts their rows."""

from dataclasses import dataclass, replace

import torch

from siirl_dask.algorithms import EpisodeRows, TurnOutcomes


@dataclass(frozen=True)
class Row:
    """A row: its group, episode, agent and part, and its turns as (reward, state, values of the
    tokens).
    """

    group: int
    episode: int
    turns: tuple
    agent: int = 0
    part: int | None = None


def turn(reward, state=0, values=(0.0,)):
    return (reward, state, tuple(values))


def outcomes_of(rows, *, ids=None, values=False):
    """TurnOutcomes of rows; the row at place i has row id ``ids[i]``, by default i."""
    turns = [turn for row in rows for turn in row.turns]
    parts = {key: at for at, key in enumerate(dict.fromkeys(part_of(row) for row in rows))}
    numbers = torch.tensor
    return TurnOutcomes(
        rows=EpisodeRows(
            row_ids=numbers(list(range(len(rows)) if ids is None else ids), dtype=torch.int64),
            group_ids=numbers([row.group for row in rows], dtype=torch.int64),
            episode_ids=numbers([row.episode for row in rows], dtype=torch.int64),
            agents=numbers([row.agent for row in rows], dtype=torch.int64),
            parts=numbers([parts[part_of(row)] for row in rows], dtype=torch.int64),
        ),
        offsets=numbers([0, *[len(row.turns) for row in rows]]).cumsum(0),
        rewards=numbers([reward for reward, _, _ in turns], dtype=torch.float32),
        states=numbers([state for _, state, _ in turns], dtype=torch.int64),
        lengths=numbers([len(own) for _, _, own in turns], dtype=torch.int64),
        values=numbers([value for _, _, own in turns for value in own], dtype=torch.float32)
        if values
        else None,
    )


def part_of(row):
    return (row.episode, row.agent, row.part)


def permuted(rows, order):
    """The rows in another order, with the row ids that they had."""
    return [rows[at] for at in order], list(order)


def in_segments(rows, cuts):
    """Each row in two, where ``cuts`` says after how many of its turns."""
    return [
        replace(row, turns=piece)
        for row, cut in zip(rows, cuts, strict=True)
        for piece in (
            row.turns[: cut % (len(row.turns) + 1)],
            row.turns[cut % (len(row.turns) + 1) :],
        )
    ]


def by_turn(rows, estimated, order=None):
    """The estimate of each turn, by its row's place before the permutation and its own, token by
    token.
    """
    order = range(len(rows)) if order is None else order
    numbers = iter(zip(estimated.advantages.tolist(), estimated.returns.tolist(), strict=True))
    of_tokens = len(estimated.advantages) != sum(len(row.turns) for row in rows)
    return {
        (at, number): [next(numbers) for _ in (own if of_tokens else [0])]
        for at, row in zip(order, rows, strict=True)
        for number, (_, _, own) in enumerate(row.turns)
    }
