"""The comparison of runs with a tool as a page of documentation."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from .page import QUIET, Measured, how, markdown, speed_table
from .runs import OURS, SIDES, TRL
from .turns_setting import CALL, RARE, SLOW_CALL

INTRODUCTION = """\
# Turns, next to TRL

GRPO with a tool by this package, whose node `play` takes the place of generation, and by TRL's `GRPOTrainer` with an
`environment_factory`. Model and task are those of configs/quickstart_tools.yaml: 0.3M parameters that are to add two
numbers of three digits, have a calculator, and call it in about a quarter of their episodes before RL.
"""
ALIKE = """\
**Alike**: the model folder, whose chat template and response template both read; prompts in the same order; 32 prompts
a step with 8 episodes each, at temperature 1, of at most two turns and 64 tokens, the tool's included; 2 optimizer
steps a step in float32; loss `grpo` with clip 0.2 and no KL, over the policy's tokens alone; AdamW, learning rate
3e-4 after a rise over 5 optimizer steps; gradients clipped at norm 1. The reward is 1 where the last message is the
sum. Both generate with transformers, all 256 episodes at once. The tool is the same function, which is not async. In
TRL 1.16 an async one would not change its times: the trainer's `_tool_call_loop` gathers the calls of one message and
waits for them before it goes on to the next episode.

**Not alike**: a call that cannot be read ends the episode in TRL and is answered with what was wrong here; mini-batches
and padding as [there](trl.md#whole-runs).
"""
SUCCESS = """\
Success is the mean reward of 4 sampled episodes of each of 256 validation prompts, before and after the run, measured
by the same node on both models. Rewards are those of the steps' own episodes.
"""
SPEED = """\
Fresh processes take turns, in reversed order every other round, pinned to the same cores with all that they start. TRL
is one process with a torch thread a core; here each worker has one. A step is all of it: prompts, turns, rewards, old
log-probs, two updates, new weights, and here also every row written to disk. The start and the first two steps are not
counted. *load before* is the machine's over the last minute, in which the side before has its part. A slow tool waits
in `time.sleep`: in TRL one call after the other, here up to 64 at once (`environments.concurrency`).
"""
_LAST = 3  # steps that stand for the end of a run
_PARTS = {
    "instant, 1 core": "The tool answers at once, one core",
    "instant, 2 cores": "The tool answers at once, two cores",
    "slow, 1 core": f"A call takes {CALL * 1e3:g} ms, one in {RARE} {SLOW_CALL * 1e3:g} ms, one core",
    "slow, 2 cores": f"A call takes {CALL * 1e3:g} ms, one in {RARE} {SLOW_CALL * 1e3:g} ms, two cores",
}
"""Parts with samples per second, and what they are of."""


def write_page(out: Path, record: Path, parts: Mapping[str, Measured]) -> None:
    """Write the page and the raw record. Parts that were never measured are left out."""
    for place in (out.parent, record.parent):
        place.mkdir(parents=True, exist_ok=True)
    record.write_text(json.dumps(parts, indent=1) + "\n")
    blocks = [INTRODUCTION, "\n".join(f"* {line}" for line in summary(parts)), ALIKE]
    if "success" in parts:
        blocks += [
            "## Success",
            SUCCESS,
            _success_table(parts["success"]["found"]),
            how(parts["success"]),
        ]
    for at, (name, part) in enumerate(_speeds(parts)):
        blocks += [*(["## Samples per second", SPEED] if not at else []), f"### {_PARTS[name]}"]
        blocks += [speed_table(part["found"]), how(part)]
    out.write_text("\n\n".join(block.strip("\n") for block in blocks) + "\n")


def summary(parts: Mapping[str, Measured]) -> Iterator[str]:
    """A line a part."""
    if "success" in parts:
        found = parts["success"]["found"]
        ends = (
            f"{side} {_success(found[side], 0):.3f} -> {_success(found[side], -1):.3f}"
            for side in SIDES
        )
        yield (
            f"success, {len(found[OURS][0]['rewards'])} steps: {', '.join(ends)}, means of "
            f"{len(found[OURS])} seeds"
        )
    for name, part in _speeds(parts):
        found = part["found"]
        loud = max(found["loads"])
        trust = f" (load of up to {loud:.1f} before a round)" if loud > QUIET else ""
        rates = (
            f"ours {found['medians'][OURS]:.0f}, trl {found['medians'][TRL]:.0f}, ratio "
            f"{found['ratio']:.2f}"
        )
        yield f"samples per second, {name}: {rates}{trust}"


def _speeds(parts: Mapping[str, Measured]) -> list[tuple[str, Measured]]:
    return [(name, parts[name]) for name in _PARTS if name in parts]


def _success(runs: Sequence[Mapping[str, Any]], at: int) -> float:
    return mean(run["accuracy"][at] for run in runs)


def _success_table(found: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    rows = [["run", "success before", "after", "reward, first step", f"last {_LAST}"]]
    for side, runs in found.items():
        for at, run in enumerate(runs, start=1):
            numbers = [*run["accuracy"], run["rewards"][0], mean(run["rewards"][-_LAST:])]
            rows.append([f"{side}: run {at}", *(f"{number:.3f}" for number in numbers)])
    return markdown(rows)
