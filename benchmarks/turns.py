"""Turns whose environments answer after a while: `play` against a loop that waits for all of them after each turn.

    python benchmarks/turns.py [--engine transformers] [--episodes 256] [--rows 32] [--call 0.1] [--out FILE]

Episodes have 1 to 8 turns of 24 tokens. A call of an environment takes ``--call`` seconds, and one in 20 ten times as
long. Lock-step, as most frameworks play: all episodes take a turn, as many at a time as the engine has rows; then all
environments answer; then comes the next turn. All ways must make the same rows.
"""

from __future__ import annotations

import argparse
import asyncio
import platform
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import pyarrow as pa
from rich.console import Console

from siirl_dask.models.broken_imports import hide

hide()

from siirl_dask.config import Engine, EnvironmentsConfig, ModelConfig, RolloutConfig  # noqa: E402
from siirl_dask.context import Context, Device, Rank  # noqa: E402
from siirl_dask.environments import Step, build_environments  # noqa: E402
from siirl_dask.nodes import encode_prompts, play  # noqa: E402
from siirl_dask.nodes.episodes.episode_queue import EpisodeQueue  # noqa: E402
from siirl_dask.rollout import RolloutEngine, build_engine  # noqa: E402
from siirl_dask.tasks.tiny_model import tiny_model  # noqa: E402

_RARE, _SLOWER, _TURNS, _TURN_TOKENS = 20, 10, 8, 24
_OPEN = (1, 2, 4, 8)  # open episodes for each row of the engine
_SIZES = {"hidden": 128, "layers": 2, "heads": 4, "kv_heads": 2, "intermediate": 384}


class World:
    """An environment that answers after a while; its turns and times depend on the episode's
    prompt alone.
    """

    call = 0.1

    async def reset(self, row: Mapping[str, Any], seed: int) -> None:
        self._chance, self._turns = random.Random(str(row["prompt"])), 0
        self._last = self._chance.randint(1, _TURNS)

    async def step(self, text: str) -> Step:
        self._turns += 1
        await asyncio.sleep(self.call * (_SLOWER if self._chance.randrange(_RARE) == 0 else 1))
        return Step(observation=" ok ", reward=1.0, done=self._turns == self._last)


class LockStep(EpisodeQueue):
    """Gives turns only when the environments of all open episodes have answered, and then those
    of all.
    """

    left = 0
    """Turns of the round that the engine has not got yet."""

    def next(self, limit: int, *, wait: bool) -> Sequence[Any]:
        self.rows = max(self.rows, limit)
        while wait and not self.left:
            while self._begin_more(wait=False):
                pass
            if not self._open:
                break
            self._take_answers(0.1)
            self.left = len(self._ready) if len(self._ready) == len(self._open) else 0
        turns = [self._ready.popleft() for _ in range(min(limit, self.left))]
        self.left -= len(turns)
        self._change_running(len(turns))
        return [(turn, turn.episode.request()) for turn in turns]


@dataclass(frozen=True)
class Case:
    name: str
    queue: type[EpisodeQueue]
    max_open: int


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engine", choices=["transformers", "vllm"], default="transformers")
    parser.add_argument("--episodes", type=int, default=256)
    parser.add_argument("--rows", type=int, default=32, help="of the engine")
    parser.add_argument("--call", type=float, default=World.call, help="seconds of a call")
    parser.add_argument(
        "--times", type=int, default=3, help="how often each case is measured, by turns"
    )
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    World.call = given.call
    cases = [Case("lock-step", LockStep, given.episodes)]
    cases += [
        Case(f"play, {each * given.rows} open", EpisodeQueue, each * given.rows) for each in _OPEN
    ]
    with TemporaryDirectory() as folder:
        model = ModelConfig(path=str(tiny_model(Path(folder) / "model", **_SIZES)))
        rollout = RolloutConfig(
            engine=Engine(given.engine),
            n=1,
            max_rows=given.rows,
            max_response_length=_TURNS * (_TURN_TOKENS + 8),
        )
        engine = build_engine(Device("bench"), Rank(), model=model, rollout=rollout)
        measured: dict[str, list[tuple[float, float]]] = {case.name: [] for case in cases}
        rows: list[pa.Table] = []
        measure(engine, rollout, cases[-1], 8)  # warms up
        for case in [case for _ in range(given.times) for case in cases]:
            made, *figures = measure(engine, rollout, case, given.episodes)
            rows.append(made)
            measured[case.name].append((figures[0], figures[1]))
            print(f"{case.name}: {figures[0]:.2f} s, {figures[1]:.0%} filled", flush=True)
        engine.close()
    exact = [name for name in rows[0].column_names if name != "rollout_logprobs"]
    if not all(table.select(exact).equals(rows[0].select(exact)) for table in rows):
        raise SystemExit("the rows of two ways to play differ")
    text = page(given, cases, measured)
    Console().print(text)
    if given.out:
        given.out.write_text(text)


def measure(
    engine: RolloutEngine, rollout: RolloutConfig, case: Case, episodes: int
) -> tuple[pa.Table, float, float]:
    """Return the rows, the seconds, and the share of the engine's rows that was filled."""
    config = EnvironmentsConfig(
        turns=_TURNS, turn_tokens=_TURN_TOKENS, max_open=case.max_open, concurrency=episodes
    )
    device = Device("bench")
    world = build_environments(device, Rank(), environments=config, environment=World)
    ctx = Context(1, 0, Rank(), device, engine, resources={"environments": world})
    table = encode_prompts(ctx, prompts(episodes), max_prompt_length=16)
    try:
        with patch("siirl_dask.nodes.episodes.play_common.EpisodeQueue", case.queue):
            began = time.perf_counter()
            made = play(ctx, table, rollout=rollout, environments=config, max_prompt_length=16)
            seconds = time.perf_counter() - began
    finally:
        world.close()
    filled = ctx.metrics["rollout/rows_filled"].value
    assert filled is not None
    return made, seconds, filled


def prompts(count: int) -> pa.Table:
    ids = pa.array(range(count), pa.int64())
    texts = pa.array([f"Play {at}:" for at in range(count)])
    return pa.table(
        {"row_id": ids, "group_id": ids, "tokens": ids, "prompt": texts, "answer": texts}
    )


def page(
    given: argparse.Namespace,
    cases: Sequence[Case],
    measured: Mapping[str, Sequence[tuple[float, float]]],
) -> str:
    first = median(seconds for seconds, _ in measured[cases[0].name])
    lines = [
        "# Turns whose environments answer after a while",
        "",
        f"`python benchmarks/turns.py --engine {given.engine}` on {platform.machine()}: "
        f"{given.episodes} episodes of 1 to {_TURNS} turns of {_TURN_TOKENS} tokens, {given.rows} "
        "rows of the engine, one worker of one thread, a model of 0.4 million parameters. A call "
        f"takes {given.call} s, one in {_RARE} {given.call * _SLOWER:g} s. Medians of "
        f"{given.times}, with their range, the ways by turns; all make the same rows.",
        "",
        "| | seconds | rows filled | against lock-step |",
        "|---|---|---|---|",
    ]
    for case in cases:
        seconds = [second for second, _ in measured[case.name]]
        filled = median(share for _, share in measured[case.name])
        middle, span = median(seconds), f"{min(seconds):.2f} to {max(seconds):.2f}"
        lines.append(
            f"| {case.name} | {middle:.2f} ({span}) | {filled:.0%} | {first / middle:.2f} |"
        )
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    main()
