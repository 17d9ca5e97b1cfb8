"""Rows of played episodes: as they grow turn by turn, and as plain data for workers that play each other's episodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from numbers import Real
from typing import Any, TypeGuard

import numpy as np
import pyarrow as pa

from siirl_dask.errors import PeerError
from siirl_dask.rollout import FinishReason, Generation
from siirl_dask.rollout.requests import ImageMessage

NOT_SAMPLED = -1
"""Version of the weights of a token that the policy did not sample."""
_LARGEST = 3.4028234663852886e38  # the largest float32
_TURN = {"start": int, "stop": int, "reward": float, "state": int}


@dataclass(slots=True)
class Turn:
    """One turn of the policy within a row."""

    start: int
    """Index, in the row's response, of its first token."""
    stop: int
    """Index after its last token."""
    reward: float = 0.0
    state: int = 0
    """Hash of the state that it was taken in; 0: none."""


@dataclass(slots=True)
class PlayedRow:
    """One row of an episode: what one agent has seen and said, until its history is rewritten or the episode ends."""

    agent: str | None
    segment: int
    prompt: list[int]
    response: list[int] = field(default_factory=list)
    mask: list[bool] = field(default_factory=list)
    """True for a token that the policy sampled."""
    logprobs: list[float] = field(default_factory=list)
    """0 for a token of the environment."""
    turns: list[Turn] = field(default_factory=list)
    parts: dict[str, float] = field(default_factory=dict)
    """Sums of the numbers that the environment gave beside the rewards."""
    reason: FinishReason = FinishReason.STOP
    versions: list[int] = field(default_factory=list)
    """Version of the weights that sampled each token; ``NOT_SAMPLED`` for a token of the environment."""
    observed: list[tuple[int, bytes]] = field(default_factory=list)
    """Files of the images that the environment has shown, each with the place of its first token in the row."""

    @property
    def reward(self) -> float | None:
        """Sum of the turns' rewards; None where the episode failed."""
        return None if self.reason is FinishReason.FAILED else sum(turn.reward for turn in self.turns)

    def say(self, generation: Generation, version: int, *, goes_on: bool = False) -> None:
        """Append a turn of the policy, or, where the latest one ``goes_on``, more of it."""
        start = len(self.response)
        self.response += generation.token_ids
        self.mask += [True] * len(generation.token_ids)
        self.logprobs += generation.logprobs
        self.versions += [version] * len(generation.token_ids)
        if goes_on:
            self.turns[-1].stop = len(self.response)
        else:
            self.turns.append(Turn(start, len(self.response)))
        self.reason = generation.finish_reason

    def hear(self, token_ids: Sequence[int]) -> None:
        """Append tokens of the environment."""
        self.response += token_ids
        self.mask += [False] * len(token_ids)
        self.logprobs += [0.0] * len(token_ids)
        self.versions += [NOT_SAMPLED] * len(token_ids)


@dataclass(frozen=True, slots=True)
class Played:
    """An episode that has ended."""

    rows: Sequence[PlayedRow]
    """In the order in which they began, at least one."""
    worker: str
    """The worker that played it."""
    failure: str | None = None
    """The reason why it failed; None if it did not."""


def is_number(value: object) -> TypeGuard[float]:
    """Return whether a value is a number that is finite as float32, the type of the columns."""
    return isinstance(value, Real) and bool(abs(float(value)) <= _LARGEST)


Item = Mapping[str, Any]
"""An episode that is to be played: the columns of its row, with the episode's number as its id, and the images that its
prompt shows, a tuple under ``SHOWN``."""
SHOWN = "shown"


@dataclass(frozen=True, slots=True)
class EpisodeCodec:
    """Packs episodes for a peer that plays them, and what it played. All data from peers is checked.

    The bytes of an image are once in a message, so a message has a codec of its own.
    """

    schema: pa.Schema
    """Columns of an item, besides its images."""
    version: int
    """Version of the weights that must play."""
    most_rows: int
    """Most rows of an episode."""
    images: ImageMessage = field(default_factory=ImageMessage)

    def pack_item(self, item: Item) -> dict[str, Any]:
        """Return an episode that has not begun as plain data."""
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, self.schema) as writer:
            writer.write_table(pa.Table.from_pylist([dict(item)], self.schema))
        shown = [*map(self.images.pack, item.get(SHOWN, ()))]
        return {"row": sink.getvalue().to_pybytes(), "version": self.version, SHOWN: shown}

    def read_item(self, value: object) -> Item:
        """Return the episode in ``value``. PeerError for anything else, and for one that other weights must play."""
        match value:
            case {"row": bytes(packed), "version": int(wanted), "shown": list(shown) | tuple(shown)}:
                if wanted != self.version:
                    raise PeerError(
                        f"was given an episode for weights of version {wanted}: those here are {self.version}"
                    )
                return {**self._row(packed), SHOWN: tuple(map(self.images.read, shown))}
        raise PeerError(f"received {str(value)[:80]!r}, which is no episode")

    def _row(self, packed: bytes) -> Item:
        try:
            with pa.ipc.open_stream(packed) as reader:
                if not reader.schema.equals(self.schema):
                    raise PeerError(f"received an episode with the columns {reader.schema.names}: expected other ones")
                table = reader.read_all()
            table.validate(full=True)
        except pa.ArrowException as error:
            raise PeerError(f"received an episode that cannot be read: {error}") from error
        if table.num_rows != 1:
            raise PeerError(f"received {table.num_rows} rows for an episode: expected one")
        return dict(table.to_pylist()[0])

    def pack_result(self, played: Played) -> dict[str, Any]:
        """Return a played episode as plain data."""
        rows = [_pack_row(row) for row in played.rows]
        return {"rows": rows, "worker": played.worker, "failure": played.failure or ""}

    def read_result(self, value: object) -> Played:
        """Return the played episode in ``value``. PeerError for anything else."""
        match value:
            case {"rows": list(rows), "worker": str(worker), "failure": str(failure)}:
                if 1 <= len(rows) <= self.most_rows:
                    return Played([_read_row(row, self.version) for row in rows], worker, failure or None)
        raise PeerError(f"received {str(value)[:80]!r}, which is no played episode")


def _pack_row(row: PlayedRow) -> dict[str, Any]:
    numbers = {"prompt": row.prompt, "response": row.response, "mask": row.mask}
    return {
        "agent": row.agent,
        "segment": row.segment,
        "reason": str(row.reason),
        "parts": row.parts,
        "logprobs": np.asarray(row.logprobs, "<f8").tobytes(),
        "turns": [[turn.start, turn.stop, turn.reward, turn.state] for turn in row.turns],
        "observed": [list(one) for one in row.observed],
        **{name: np.asarray(values, "<i4").tobytes() for name, values in numbers.items()},
    }


def _read_row(value: object, version: int) -> PlayedRow:
    """Return the row in ``value``, sampled by weights of ``version``. PeerError unless its parts fit together."""
    match value:
        case {
            "agent": str() | None as agent,
            "segment": int(segment),
            "reason": str(reason),
            "parts": dict(parts),
            "logprobs": bytes(logprobs),
            "turns": list(turns),
            "prompt": bytes(prompt),
            "response": bytes(response),
            "mask": bytes(mask),
            "observed": list(observed),
        } if reason in list(FinishReason):
            own = [bool(flag) for flag in _numbers(mask, "<i4")]
            row = PlayedRow(
                agent,
                segment,
                _numbers(prompt, "<i4"),
                _numbers(response, "<i4"),
                own,
                _numbers(logprobs, "<f8"),
                [_read_turn(turn) for turn in turns],
                parts,
                FinishReason(reason),
                [version if flag else NOT_SAMPLED for flag in own],
                [*map(_read_observed, observed)],
            )
            if _fits(row):
                return row
    raise PeerError(f"received {str(value)[:80]!r}, which is no row of an episode")


def _read_turn(value: object) -> Turn:
    if isinstance(value, list) and [*map(type, value)] == [*_TURN.values()]:
        return Turn(*value)
    raise PeerError(f"received {str(value)[:80]!r}, which is no turn")


def _read_observed(value: object) -> tuple[int, bytes]:
    match value:
        case [int(start), bytes(data)]:
            return start, data
    raise PeerError(f"received {str(value)[:80]!r}, which is no image of a row")


def _fits(row: PlayedRow) -> bool:
    """Return whether the parts of a row that a peer sent have the lengths and the values that they can have."""
    length = len(row.response)
    ends = [0, *(at for turn in row.turns for at in (turn.start, turn.stop)), length]
    numbers = [*row.parts.values(), *(turn.reward for turn in row.turns)]
    starts = [-1, *(start for start, _ in row.observed), length + len(row.prompt)]
    return (
        len(row.mask) == length == len(row.logprobs)
        and bool(row.prompt)
        and min(row.prompt + row.response) >= 0
        and 0 <= row.segment < 2**31
        and ends == sorted(ends)
        and starts == sorted({*starts})
        and all(map(isfinite, row.logprobs))
        and all(isinstance(name, str) for name in row.parts)
        and all(map(is_number, numbers))
        and all(-(2**63) <= turn.state < 2**63 for turn in row.turns)
    )


def _numbers(packed: bytes, kind: str) -> list[Any]:
    """Return the numbers in ``packed``. PeerError for a length that is no multiple of theirs."""
    if len(packed) % np.dtype(kind).itemsize:
        raise PeerError(f"received {len(packed)} bytes where numbers of {np.dtype(kind).itemsize} were expected")
    return list(np.frombuffer(packed, kind).tolist())
