"""Rows of played episodes: as they grow turn by turn, and as plain data for workers that play
each other's episodes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from numbers import Real
from typing import Any, TypeGuard

import numpy as np
import pyarrow as pa

from siirl_dask.errors import PeerError
from siirl_dask.nodes.continued.row_progress import NOT_SAMPLED
from siirl_dask.rollout import FinishReason, Generation
from siirl_dask.rollout.requests import ImageMessage

_LARGEST_FLOAT32 = 3.4028234663852886e38


@dataclass(slots=True)
class Turn:
    """One turn of the policy within a row."""

    start: int
    """Index, in the row's response, of its first token."""
    stop: int
    """Index after its last token."""
    reward: float = 0.0
    state: int = 0
    """Hash of the environment's state that the turn was taken in; 0 where it gave none."""


@dataclass(slots=True)
class PlayedRow:
    """One row of an episode: the tokens that one agent has read and sampled, until its history is
    rewritten or the episode ends.
    """

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
    """Sums of the numbers that the environment gave in addition to the rewards, by name."""
    reason: FinishReason = FinishReason.STOP
    versions: list[int] = field(default_factory=list)
    """Version of the weights that sampled each token; ``NOT_SAMPLED`` for a token of the
    environment."""
    observed: list[tuple[int, bytes]] = field(default_factory=list)
    """Files of the images that the environment has shown, each with the index of its first token
    in the row."""

    @property
    def reward(self) -> float | None:
        """Sum of the turns' rewards; None where the episode failed."""
        if self.reason is FinishReason.FAILED:
            return None
        return sum(turn.reward for turn in self.turns)

    def add_turn(
        self,
        generation: Generation,
        version: int,
        *,
        continues_turn: bool = False,
    ) -> None:
        """Append a turn of the policy, or, with ``continues_turn``, more tokens of the latest
        one. ``version`` of the weights has sampled it unless the engine has recorded others.
        """
        start = len(self.response)
        self.response += generation.token_ids
        self.mask += [True] * len(generation.token_ids)
        self.logprobs += generation.logprobs
        self.versions += generation.versions_or(version)
        if continues_turn:
            self.turns[-1].stop = len(self.response)
        else:
            self.turns.append(Turn(start, len(self.response)))
        self.reason = generation.finish_reason

    def add_observation(self, token_ids: Sequence[int]) -> None:
        """Append tokens of the environment."""
        self.response += token_ids
        self.mask += [False] * len(token_ids)
        self.logprobs += [0.0] * len(token_ids)
        self.versions += [NOT_SAMPLED] * len(token_ids)


@dataclass(frozen=True, slots=True)
class PlayedEpisode:
    """An episode that has ended."""

    rows: Sequence[PlayedRow]
    """In the order in which they began, at least one."""
    worker: str
    """The worker that played it."""
    failure: str | None = None
    """The reason why it failed; None if it did not."""


def is_number(value: object) -> TypeGuard[float]:
    """Return whether a value is a number that is finite as float32, the type of the columns."""
    if not isinstance(value, Real):
        return False
    return bool(abs(value) <= _LARGEST_FLOAT32)  # type: ignore[operator]  # a whole number may be larger than any float


Item = Mapping[str, Any]
"""An episode to play: the columns of its row, with the episode's number as its id, and a tuple of
the images of its prompt under ``PROMPT_IMAGES``."""
PROMPT_IMAGES = "shown"


@dataclass(frozen=True, slots=True)
class EpisodeCodec:
    """Packs episodes for a peer that plays them, and the played ones for the way back. All data
    from peers is checked.

    The bytes of an image are once in a message, so a message has a codec of its own.
    """

    schema: pa.Schema
    """Columns of an item, besides its images."""
    version: int
    """Version of the weights that must play, or a number of the step where each worker loads newer
    ones while it plays; no weights are newer."""
    most_rows: int
    """Most rows of an episode."""
    images: ImageMessage = field(default_factory=ImageMessage)

    def pack_item(self, item: Item) -> dict[str, Any]:
        """Return an episode that has not begun as plain data."""
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, self.schema) as writer:
            writer.write_table(pa.Table.from_pylist([dict(item)], self.schema))
        images = [self.images.pack(image) for image in item.get(PROMPT_IMAGES, ())]
        return {"row": sink.getvalue().to_pybytes(), "version": self.version, PROMPT_IMAGES: images}

    def read_item(self, value: object) -> Item:
        """Return the episode in ``value``. PeerError for anything else, and for weights of
        another version.
        """
        match value:
            case {
                "row": bytes(packed),
                "version": int(version),
                "shown": list(images) | tuple(images),
            }:
                if version != self.version:
                    raise PeerError(
                        f"was given an episode for weights of version {version}: those here are "
                        f"{self.version}"
                    )
                return {
                    **self._read_columns(packed),
                    PROMPT_IMAGES: tuple(map(self.images.read, images)),
                }
        raise PeerError(f"received {str(value)[:80]!r}, which is no episode")

    def _read_columns(self, packed: bytes) -> Item:
        """Return the columns of the one row of an Arrow stream. PeerError for anything else."""
        try:
            with pa.ipc.open_stream(packed) as reader:
                if not reader.schema.equals(self.schema):
                    raise PeerError(
                        f"received an episode with the columns {reader.schema.names}: expected "
                        "other ones"
                    )
                table = reader.read_all()
            table.validate(full=True)
        except pa.ArrowException as error:
            raise PeerError(f"received an episode that cannot be read: {error}") from error
        if table.num_rows != 1:
            raise PeerError(f"received {table.num_rows} rows for an episode: expected one")
        return dict(table.to_pylist()[0])

    def pack_result(self, played: PlayedEpisode) -> dict[str, Any]:
        """Return a played episode as plain data."""
        rows = [_pack_row(row) for row in played.rows]
        return {"rows": rows, "worker": played.worker, "failure": played.failure or ""}

    def read_result(self, value: object) -> PlayedEpisode:
        """Return the played episode in ``value``. PeerError for anything else."""
        match value:
            case {"rows": list(rows), "worker": str(worker), "failure": str(failure)}:
                if 1 <= len(rows) <= self.most_rows:
                    read_rows = [_read_row(row, self.version) for row in rows]
                    return PlayedEpisode(read_rows, worker, failure or None)
        raise PeerError(f"received {str(value)[:80]!r}, which is no played episode")


def _pack_row(row: PlayedRow) -> dict[str, Any]:
    return {
        "agent": row.agent,
        "segment": row.segment,
        "reason": str(row.reason),
        "parts": row.parts,
        "logprobs": np.asarray(row.logprobs, "<f8").tobytes(),
        "turns": [[turn.start, turn.stop, turn.reward, turn.state] for turn in row.turns],
        "observed": [list(image) for image in row.observed],
        "prompt": np.asarray(row.prompt, "<i4").tobytes(),
        "response": np.asarray(row.response, "<i4").tobytes(),
        "mask": np.asarray(row.mask, "<i4").tobytes(),
        "versions": np.asarray(row.versions, "<i8").tobytes(),
    }


def _read_row(value: object, newest: int) -> PlayedRow:
    """Return the row in ``value``, sampled by weights of version ``newest`` or older ones.
    PeerError unless its parts fit together.
    """
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
            "versions": bytes(versions),
            "observed": list(observed),
        } if reason in list(FinishReason):
            flags = [bool(flag) for flag in _read_numbers(mask, "<i4")]
            row = PlayedRow(
                agent=agent,
                segment=segment,
                prompt=_read_numbers(prompt, "<i4"),
                response=_read_numbers(response, "<i4"),
                mask=flags,
                logprobs=_read_numbers(logprobs, "<f8"),
                turns=[_read_turn(turn) for turn in turns],
                parts=parts,
                reason=FinishReason(reason),
                versions=_read_numbers(versions, "<i8"),
                observed=[_read_observed(image) for image in observed],
            )
            if _is_consistent(row) and max(row.versions, default=NOT_SAMPLED) <= newest:
                return row
    raise PeerError(f"received {str(value)[:80]!r}, which is no row of an episode")


def _read_turn(value: object) -> Turn:
    if isinstance(value, list) and [type(number) for number in value] == [int, int, float, int]:
        start, stop, reward, state = value
        return Turn(start, stop, reward, state)
    raise PeerError(f"received {str(value)[:80]!r}, which is no turn")


def _read_observed(value: object) -> tuple[int, bytes]:
    match value:
        case [int(start), bytes(data)]:
            return start, data
    raise PeerError(f"received {str(value)[:80]!r}, which is no image of a row")


def _is_consistent(row: PlayedRow) -> bool:
    """Return whether the parts of a row that a peer sent have lengths and values that belong to
    one row.
    """
    length = len(row.response)
    boundaries = [0]
    for turn in row.turns:
        boundaries += [turn.start, turn.stop]
    boundaries.append(length)
    image_starts = [start for start, _ in row.observed]
    limits = [-1, *image_starts, len(row.prompt) + length]
    numbers = [*row.parts.values(), *(turn.reward for turn in row.turns)]
    checks = (
        len(row.mask) == length,
        len(row.logprobs) == length,
        [version >= 0 for version in row.versions] == row.mask,
        min(row.versions, default=NOT_SAMPLED) >= NOT_SAMPLED,
        len(row.prompt) > 0,
        min(row.prompt + row.response, default=-1) >= 0,
        0 <= row.segment < 2**31,
        boundaries == sorted(boundaries),
        limits == sorted(set(limits)),
        all(isfinite(logprob) for logprob in row.logprobs),
        all(isinstance(name, str) for name in row.parts),
        all(is_number(number) for number in numbers),
        all(-(2**63) <= turn.state < 2**63 for turn in row.turns),
    )
    return all(checks)


def _read_numbers(packed: bytes, kind: str) -> list[Any]:
    """Return the numbers in ``packed``. PeerError for a length that is no multiple of their
    size.
    """
    size = np.dtype(kind).itemsize
    if len(packed) % size:
        raise PeerError(f"received {len(packed)} bytes where numbers of {size} were expected")
    return list(np.frombuffer(packed, kind).tolist())
