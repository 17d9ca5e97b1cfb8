"""The rows of episodes that agents lived: as a table, as plain data for other workers, and what is logged of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from siirl_dask.context import Context, Reduce
from siirl_dask.errors import PeerError
from siirl_dask.nodes.episode_rows import EpisodeCodec, Played, PlayedRow, Turn, is_number
from siirl_dask.nodes.episode_table import log_rewards, log_rows, rows_of_episodes
from siirl_dask.rewards import Score
from siirl_dask.rollout import FinishReason, RolloutEngine
from siirl_dask.rollout.endpoint import Segment
from siirl_dask.schema import (
    FINISH_REASON,
    REWARD,
    REWARD_PARTS,
    SAMPLING_SEED,
    SEGMENT,
    TOKEN_VERSIONS,
    TURNS,
    WEIGHTS_VERSION,
    WORKER,
)


@dataclass(frozen=True, slots=True)
class Lived:
    """An episode that has ended."""

    segments: Sequence[Segment]
    """Its rows, at least one."""
    score: Score
    """The reward that the agent returned; none where it returned None, or failed."""
    requests: int
    seconds: float
    worker: str
    """The worker on which the agent ran."""


@dataclass(frozen=True, slots=True)
class AgentCodec:
    """Packs episodes for a peer that runs their agents, and what came of them. All data from peers is checked."""

    episodes: EpisodeCodec

    def pack_result(self, lived: Lived) -> dict[str, Any]:
        """Return an episode that has ended as plain data."""
        rows = [
            PlayedRow(
                None,
                at,
                row.prompt,
                row.response,
                row.mask,
                row.logprobs,
                [Turn(*t) for t in row.turns],
                {},
                row.finish,
            )
            for at, row in enumerate(lived.segments)
        ]
        return {
            "episode": self.episodes.pack_result(Played(rows, lived.worker, lived.score.failure)),
            "seeds": [row.seed for row in lived.segments],
            "reward": lived.score.reward,
            "parts": dict(lived.score.parts),
            "requests": lived.requests,
            "seconds": lived.seconds,
        }

    def read_result(self, value: object) -> Lived:
        """Return the episode in ``value``, whose rows this worker's version of the weights sampled.

        PeerError for anything else.
        """
        match value:
            case {
                "episode": packed,
                "seeds": list(seeds),
                "reward": float() | None as reward,
                "parts": dict(parts),
                "requests": int(requests),
                "seconds": float(seconds),
            }:
                played = self.episodes.read_result(packed)
                score = Score(reward, parts, played.failure)
                if _fits(played, seeds, score) and requests >= 0 and seconds >= 0:
                    rows = zip(played.rows, seeds, strict=True)
                    segments = [_segment(row, seed) for row, seed in rows]
                    return Lived(segments, score, requests, seconds, played.worker)
        raise PeerError(f"received {str(value)[:80]!r}, which is no episode of an agent")


def _segment(row: PlayedRow, seed: int) -> Segment:
    spans = [(turn.start, turn.stop) for turn in row.turns]
    return Segment(row.prompt, seed, (), row.response, row.logprobs, row.mask, row.versions, spans, row.reason)


def _fits(played: Played, seeds: Sequence[object], score: Score) -> bool:
    """Return whether what a peer sent beside an episode's rows has the values that it can have."""
    return (
        len(seeds) == len(played.rows)
        and all(isinstance(seed, int) and 0 <= seed < 2**63 for seed in seeds)
        and (score.reward is None or is_number(score.reward))
        and (score.reward is None or score.failure is None)
        and all(isinstance(name, str) and is_number(number) for name, number in score.parts.items())
    )


def lived_rows(ctx: Context, episodes: pa.Table, lived: Sequence[Lived], max_segments: int) -> pa.Table:
    """Return the rows of each of the ``episodes``, whose row ids are their numbers.

    An episode's reward is that of its last row, and of the last turn in it; the others have 0, so that the sum over the
    rows is the episode's. Where there is none, all are null.
    """
    engine: RolloutEngine = ctx.resource
    within = [at for one in lived for at in range(len(one.segments))]
    rows = [segment for one in lived for segment in one.segments]
    scores = [_share(one.score, last=at + 1 == len(one.segments)) for one in lived for at in range(len(one.segments))]
    others: dict[str, Sequence[object]] = {
        SEGMENT: within,
        SAMPLING_SEED: [row.seed for row in rows],
        TOKEN_VERSIONS: [row.versions for row in rows],
        WEIGHTS_VERSION: [min((v for v in row.versions if v >= 0), default=engine.version) for row in rows],
        TURNS: [_turns(row, score) for row, score in zip(rows, scores, strict=True)],
        FINISH_REASON: [_reason(row, score) for row, score in zip(rows, scores, strict=True)],
        REWARD: [score.reward for score in scores],
        REWARD_PARTS: [[*score.parts.items()] for score in scores],
        WORKER: [one.worker for one in lived for _ in one.segments],
    }
    return rows_of_episodes(engine, episodes, [one.segments for one in lived], max_segments, others)


def log_lived(ctx: Context, table: pa.Table, lived: Sequence[Lived]) -> None:
    """Log lengths by row, and requests, seconds and rewards by episode."""
    turns = [sum(len(row.turns) for row in one.segments) for one in lived]
    log_rows(ctx, table, failed=sum(one.score.failure is not None for one in lived), turns=turns)
    ctx.log("episodes/seconds", [one.seconds for one in lived])
    ctx.log("episodes/longest_seconds", max((one.seconds for one in lived), default=0.0), Reduce.MAX)
    rewards = [one.score.reward for one in lived if one.score.reward is not None]
    log_rewards(ctx, rewards, [part for one in lived for part in one.score.parts.items()])


def _share(score: Score, *, last: bool) -> Score:
    """Return a row's share of its episode's score."""
    return score if last or score.reward is None else Score(0.0)


def _turns(row: Segment, score: Score) -> list[dict[str, Any]]:
    turns = [{"start": start, "stop": stop, "reward": 0.0, "state": 0} for start, stop in row.turns]
    if turns:
        turns[-1]["reward"] = score.reward or 0.0
    return turns


def _reason(row: Segment, score: Score) -> str:
    return str(FinishReason.FAILED if score.failure is not None else row.finish)
