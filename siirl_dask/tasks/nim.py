"""Builds a two-player zero-sum game on the spot, without a download: Nim, which a policy learns by
playing itself.

From a heap of 5 to 15 counters the players take 1, 2 or 3 in turn, and who takes the last one wins.
Who always leaves a multiple of 4 cannot lose, once the heap is none at its turn. A warm start on
random legal moves tells a small model the rules and no more.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from siirl_dask.config import Config
from siirl_dask.environments import Opening, Step
from siirl_dask.tasks.preparing import Progress, prepare_task, written_whole
from siirl_dask.tasks.sorting import Task, task_in, write_tables

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

FIRST = "first"
SECOND = "second"
AGENTS = (FIRST, SECOND)
HEAPS = range(5, 16)
_MOST = 3  # counters of one move
_BEST = 0.5  # share of the fixed opponent's moves that are the best ones; the others are random
_LEGAL = 0.97  # chance of a legal move that ends the warm start
_BATCH = 64
_MAX_STEPS = 400
_UNSEEN = 128  # games that tell the warm start when to stop
_COPIES = {"train": 128, "validation": 8, "test": 8}  # rows of each heap and side in the tables


class SelfPlay:
    """The environment of two agents: each hears the heap that the other left; 1 for who wins and
    -1 for who loses.
    """

    def reset(self, row: Mapping[str, Any], seed: int) -> Opening:
        """Lay the row's heap; the first agent's prompt is the row's own."""
        self._heap = heap_of(row)
        self._speaker = FIRST
        self._heard = {FIRST}
        return Opening(agent=FIRST)

    def step(self, text: str) -> Step:
        """Take the counters that the agent names whose turn it is. A move against the rules
        loses.
        """
        speaker = self._speaker
        other = FIRST
        if self._speaker == FIRST:
            other = SECOND
        taken = move_of(text, self._heap)
        if taken is None or taken == self._heap:
            winner, loser = (other, speaker) if taken is None else (speaker, other)
            return Step(
                reward={winner: 1.0, loser: -1.0},
                done=True,
                parts={"illegal": float(taken is None)},
            )
        self._heap -= taken
        self._speaker = other
        if other in self._heard:
            return Step(agent=other, observation=f" {asked(self._heap)}")
        self._heard.add(other)
        return Step(agent=other, history=asked(self._heap))


class FixedOpponent:
    """The environment of one agent, on the side that the row's ``answer`` names: the other side has
    a fixed player.

    The reward is 1 for a game that the policy wins, else 0. The player makes the best move half of
    the time and a random one otherwise, drawn from the seed alone.
    """

    def reset(self, row: Mapping[str, Any], seed: int) -> Opening:
        """Lay the row's heap, and let the player begin where the policy is second."""
        self._heap = heap_of(row)
        self._side = str(row["answer"])
        self._draw = random.Random(seed)
        if self._side == FIRST:
            return Opening(agent=FIRST)
        self._heap -= opponents_move(self._heap, self._draw)
        return Opening(prompt=asked(self._heap), agent=SECOND)

    def step(self, text: str) -> Step:
        """Take the counters that the policy names, then the player's."""
        taken = move_of(text, self._heap)
        if taken is None or taken == self._heap:
            return self._end(won=taken is not None)
        self._heap -= taken
        self._heap -= opponents_move(self._heap, self._draw)
        if self._heap:
            return Step(observation=f" {asked(self._heap)}")
        return self._end(won=False)

    def _end(self, *, won: bool) -> Step:
        return Step(reward=float(won), done=True)


def asked(heap: int) -> str:
    """Return the text that asks for a move: ``12:``."""
    return f"{heap}:"


def heap_of(row: Mapping[str, Any]) -> int:
    """Return the heap that a row's prompt tells."""
    return int(str(row["prompt"]).rstrip(":"))


def move_of(text: str, heap: int) -> int | None:
    """Return the counters that a turn takes from the heap; None for a turn against the rules."""
    if text in {str(taken) for taken in legal(heap)}:
        return int(text)
    return None


def legal(heap: int) -> range:
    """Return the moves that a heap allows."""
    return range(1, min(_MOST, heap) + 1)


def opponents_move(heap: int, draw: random.Random) -> int:
    """Return the fixed player's move: the best one half of the time, if there is one, else one
    of the legal moves.
    """
    best = heap % (_MOST + 1)
    if draw.random() < _BEST and best:
        return best
    return draw.choice(legal(heap))


def write_nim_task(folder: str | Path, *, seed: int = 0, progress: Progress | None = None) -> Task:
    """Write the data, and a model that knows the legal moves and none better than another.

    The training data is written last: its presence means complete.
    """
    from siirl_dask.tasks.tiny_model import tiny_model

    task = task_in(folder)
    with written_whole(task.model) as unfinished:
        tiny_model(unfinished, seed=seed, hidden=128, heads=4, kv_heads=2)
        _warm_start(unfinished, random.Random(seed), progress)
    rows = [(asked(heap), side) for heap in HEAPS for side in AGENTS]
    write_tables(task, {name: rows * copies for name, copies in _COPIES.items()})
    return task


def prepare(config: Config) -> None:
    """Write the task into the folder of ``data.url``, seeded with ``run.seed``: ``data.prepare``
    of the quickstart.
    """
    prepare_task(config, write_nim_task, "{:.0%} of its moves are legal")


def demonstration(order: random.Random) -> list[tuple[int, int]]:
    """Return the heaps that one side of a random game heard, and what it took."""
    heap = order.choice(HEAPS)
    moves: list[tuple[int, int]] = []
    if order.random() < 0.5:  # the second side
        heap -= order.choice(legal(heap))
    while heap:
        taken = order.choice(legal(heap))
        moves.append((heap, taken))
        heap -= taken
        heap -= order.choice(legal(heap)) if heap else 0
    return moves


def _warm_start(folder: Path, order: random.Random, progress: Progress | None) -> None:
    """Train the model in ``folder`` on random games until its moves are legal. RunError if they
    never are.
    """
    from siirl_dask.tasks.warm_start import train_until

    unseen = [demonstration(order) for _ in range(_UNSEEN)]
    train_until(
        folder,
        lambda tokenizer, step: _encoded(tokenizer, [demonstration(order) for _ in range(_BATCH)]),
        lambda model, tokenizer: _legal_share(model, tokenizer, unseen),
        wanted=_LEGAL,
        most_steps=_MAX_STEPS,
        said="{:.0%} of the model's moves are legal",
        progress=progress,
    )


def _encoded(
    tokenizer: PreTrainedTokenizerBase, games: Sequence[Sequence[tuple[int, int]]]
) -> tuple[Tensor, Tensor]:
    """Return inputs and labels, [B, T] each; only moves are learned. A token is a character."""
    from siirl_dask.tasks.warm_start import NO_LOSS, padded

    rows = [
        tokenizer(" ".join(f"{asked(heap)}{taken}" for heap, taken in game))["input_ids"]
        for game in games
    ]
    (colon,) = tokenizer(":")["input_ids"]
    labels = [
        [NO_LOSS, *(own if ahead == colon else NO_LOSS for ahead, own in pairwise(ids))]
        for ids in rows
    ]
    return padded(list(zip(rows, labels, strict=True)), tokenizer.pad_token_id)


def _legal_share(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    games: Sequence[Sequence[tuple[int, int]]],
) -> float:
    """Return the mean chance of a legal move in the games' positions."""
    from siirl_dask.tasks.warm_start import NO_LOSS

    inputs, labels = _encoded(tokenizer, games)
    # [moves, V], row by row
    chances = model(inputs, use_cache=False).logits.softmax(dim=-1)[labels != NO_LOSS]
    heaps = [heap for game in games for heap, _ in game]
    allowed = [tokenizer("".join(map(str, legal(heap))))["input_ids"] for heap in heaps]
    return sum(
        float(chance[ids].sum()) for chance, ids in zip(chances, allowed, strict=True)
    ) / len(heaps)
