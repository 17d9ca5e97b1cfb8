"""GRPO with a real model, SmolLM2-135M-Instruct, by this package and by TRL: rewards, samples per
second.

    pip install reasoning-gym gguf "trl>=1.16,<1.17"
    python benchmarks/compare_trl_real.py [--rounds 2] [--round-steps 4]

Run it in a folder of its own: it writes ``runs/real_model-data`` (model and rows, 540 MB) where
real_model.py has not.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping

from against_trl.measuring import PAGES, add_outputs, add_timing, check_trl
from against_trl.page import QUIET, Measured, how, measured_now, speed_table
from against_trl.real_setting import RealSetting
from against_trl.runs import TOLD, TRL, speed
from real_model import prepare, task_folder

_PART = "speed"
INTRODUCTION = """\
# A real model, next to TRL

GRPO with SmolLM2-135M-Instruct on the sums of [a real model](real_model.md) by this package and by TRL's `GRPOTrainer`.
"""
ALIKE = """\
**Alike**: model folder, chat template and prompts in the same order; 8 prompts a step with 8 samples each, of at most
16 tokens, at temperature 1; one optimizer step a step in float32, with no pass for old log-probs: ours are the
engine's, TRL has none where each sample is learned from once; loss `grpo` with clip 0.2 and no KL; AdamW, learning
rate 1e-5 after a rise over 2 steps; gradients clipped at norm 1. Both generate with transformers, all samples at once,
on two cores: TRL is one process with two threads, ours two workers with one thread each.

Fresh processes take turns, in reversed order every other round, pinned to the same cores with all that they start. A
step is all of it: prompts, samples, rewards, update, new weights, and here also every row written to disk. The start
and the first two steps are not counted. *load before* is the machine's over the last minute, in which the side before
has its part.
"""


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_timing(parser, rounds=2, round_steps=4)
    add_outputs(parser, PAGES / "trl_real_model.md")
    return parser


def main() -> None:
    given = make_parser().parse_args()
    check_trl()
    prepare()
    setting = RealSetting(folder=str(task_folder()))
    command = (
        f"python benchmarks/compare_trl_real.py --rounds {given.rounds} --round-steps "
        f"{given.round_steps}"
    )
    found = speed(setting, given.rounds, given.round_steps, "real", (TOLD, TRL))
    part = measured_now(command, found)
    for place in (given.out.parent, given.results):
        place.mkdir(parents=True, exist_ok=True)
    (given.results / "trl_real_model.json").write_text(json.dumps({_PART: part}, indent=1) + "\n")
    given.out.write_text(page({_PART: part}))
    print(summary(part))
    print(given.out)


def page(parts: Mapping[str, Measured]) -> str:
    """Return the page of what was measured."""
    part = parts[_PART]
    blocks = [INTRODUCTION, f"* {summary(part)}", ALIKE, speed_table(part["found"]), how(part)]
    return "\n\n".join(block.strip("\n") for block in blocks) + "\n"


def summary(part: Measured) -> str:
    """Return the result in a line."""
    found = part["found"]
    loud = max(found["loads"][:1])
    trust = f" (load of {loud:.1f} before the first round)" if loud > QUIET else ""
    ours = found["medians"][TOLD]
    trl = found["medians"][TRL]
    return f"samples per second: ours {ours:.2f}, trl {trl:.2f}, ratio {found['ratio']:.2f}{trust}"


if __name__ == "__main__":
    main()
