"""The rows of episodes that agents ran: as a table, as plain data for other workers, and as
metrics.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from siirl_dask.context import Context, Reduce
from siirl_dask.errors import PeerError
from siirl_dask.nodes.episodes.episode_rows import (
    EpisodeCodec,
    PlayedEpisode,
    PlayedRow,
    Turn,
    is_number,
)
from siirl_dask.nodes.episodes.episode_table import (
    log_rewards,
    log_rows,
    oldest_version,
    rows_of_episodes,
)
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
class AgentEpisode:
    """An episode that has ended."""

    segments: Sequence[Segment]
    """Its rows, at least one."""
    score: Score
    """The reward that the agent returned; without one where it returned None, or failed."""
    requests: int
    seconds: float
    worker: str
    """The worker on which the agent ran."""


@dataclass(frozen=True, slots=True)
class AgentCodec:
    """Packs episodes that a peer's agents have run, for the way back. All data from peers is
    checked.
    """

    episodes: EpisodeCodec

    def pack_result(self, episode: AgentEpisode) -> dict[str, Any]:
        """Return an episode that has ended as plain data."""
        rows = [_played_row(index, segment) for index, segment in enumerate(episode.segments)]
        return {
            "episode": self.episodes.pack_result(
                PlayedEpisode(rows, episode.worker, episode.score.failure)
            ),
            "seeds": [segment.seed for segment in episode.segments],
            "reward": episode.score.reward,
            "parts": dict(episode.score.parts),
            "requests": episode.requests,
            "seconds": episode.seconds,
        }

    def read_result(self, value: object) -> AgentEpisode:
        """Return the episode in ``value``. PeerError for anything else."""
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
                if _is_consistent(played, seeds, score) and requests >= 0 and seconds >= 0:
                    segments = [
                        _segment(row, seed) for row, seed in zip(played.rows, seeds, strict=True)
                    ]
                    return AgentEpisode(segments, score, requests, seconds, played.worker)
        raise PeerError(f"received {str(value)[:80]!r}, which is no episode of an agent")


def _played_row(index: int, segment: Segment) -> PlayedRow:
    """Return an episode's segment as a row; turns have no rewards of their own."""
    return PlayedRow(
        agent=None,
        segment=index,
        prompt=segment.prompt,
        response=segment.response,
        mask=segment.mask,
        logprobs=segment.logprobs,
        turns=[Turn(start, stop) for start, stop in segment.turns],
        reason=segment.finish,
        versions=segment.versions,
    )


def _segment(row: PlayedRow, seed: int) -> Segment:
    return Segment(
        prompt=row.prompt,
        seed=seed,
        order=(),
        response=row.response,
        logprobs=row.logprobs,
        mask=row.mask,
        versions=row.versions,
        turns=[(turn.start, turn.stop) for turn in row.turns],
        finish=row.reason,
    )


def _is_consistent(played: PlayedEpisode, seeds: Sequence[object], score: Score) -> bool:
    """Return whether seeds and score that a peer sent with an episode's rows have the values
    that they can have.
    """
    if len(seeds) != len(played.rows):
        return False
    if not all(isinstance(seed, int) and 0 <= seed < 2**63 for seed in seeds):
        return False
    if score.reward is not None and (not is_number(score.reward) or score.failure is not None):
        return False
    if not all(isinstance(name, str) for name in score.parts):
        return False
    return all(is_number(number) for number in score.parts.values())


def agent_rows(
    ctx: Context,
    table: pa.Table,
    episodes: Sequence[AgentEpisode],
    max_segments: int,
) -> pa.Table:
    """Return the rows of each episode; ``table`` has a row for each of them, whose row id is the
    episode's number.

    An episode's reward is that of its last row, and of the last turn in it; the others have 0, so
    that the sum over the rows is the episode's. An episode without a reward has null in all rows.
    """
    engine: RolloutEngine = ctx.resource
    segments: list[Segment] = []
    scores: list[Score] = []
    numbers: list[int] = []
    workers: list[str] = []
    for episode in episodes:
        count = len(episode.segments)
        segments += episode.segments
        numbers += range(count)
        workers += [episode.worker] * count
        others = episode.score if episode.score.reward is None else Score(0.0)
        scores += [others] * (count - 1) + [episode.score]
    with_scores = list(zip(segments, scores, strict=True))
    columns: dict[str, Sequence[object]] = {
        SEGMENT: numbers,
        SAMPLING_SEED: [segment.seed for segment in segments],
        TOKEN_VERSIONS: [segment.versions for segment in segments],
        WEIGHTS_VERSION: [oldest_version(segment.versions, engine) for segment in segments],
        TURNS: [_turns(segment, score) for segment, score in with_scores],
        FINISH_REASON: [_finish_reason(segment, score) for segment, score in with_scores],
        REWARD: [score.reward for score in scores],
        REWARD_PARTS: [[*score.parts.items()] for score in scores],
        WORKER: workers,
    }
    return rows_of_episodes(
        engine, table, [episode.segments for episode in episodes], max_segments, columns
    )


def log_agent_episodes(ctx: Context, table: pa.Table, episodes: Sequence[AgentEpisode]) -> None:
    """Log lengths by row, and requests, seconds and rewards by episode."""
    turns = [sum(len(segment.turns) for segment in episode.segments) for episode in episodes]
    log_rows(
        ctx,
        table,
        failed=sum(episode.score.failure is not None for episode in episodes),
        turns=turns,
    )
    seconds = [episode.seconds for episode in episodes]
    ctx.log("episodes/seconds", seconds)
    ctx.log("episodes/longest_seconds", max(seconds, default=0.0), Reduce.MAX)
    rewards = [episode.score.reward for episode in episodes if episode.score.reward is not None]
    parts = [part for episode in episodes for part in episode.score.parts.items()]
    log_rewards(ctx, rewards, parts)


def _turns(segment: Segment, score: Score) -> list[dict[str, Any]]:
    """Return the turns of a row, whose reward is that of the last one."""
    turns = [
        {"start": start, "stop": stop, "reward": 0.0, "state": 0} for start, stop in segment.turns
    ]
    if turns and score.reward is not None:
        turns[-1]["reward"] = score.reward
    return turns


def _finish_reason(segment: Segment, score: Score) -> str:
    if score.failure is not None:
        return str(FinishReason.FAILED)
    return str(segment.finish)
