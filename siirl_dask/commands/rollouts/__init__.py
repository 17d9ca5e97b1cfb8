"""``siirl-dask rollouts``: asks a run's samples, in SQL or one of the ready questions, and shows the answers."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator

from siirl_dask.commands.rollouts.answer import Answer, Layout
from siirl_dask.commands.rollouts.page import write_page
from siirl_dask.commands.rollouts.terminal import print_answer
from siirl_dask.commands.steps import one_step, steps_between
from siirl_dask.errors import ConfigError
from siirl_dask.observe import PipeConsole, printable
from siirl_dask.runs import questions
from siirl_dask.runs.mismatch import can_mismatch, mismatch
from siirl_dask.runs.rollouts import TABLE, Rollouts, open_rollouts

_SAMPLES = 5
_REPORT = {"zero_variance": True, "lengths": True, "best": _SAMPLES, "worst": _SAMPLES}
"""The questions of a page for which none was asked, with that of the mismatch where there are log-probs."""


def add_questions(command: ArgumentParser) -> None:
    """Add the arguments of the command."""
    command.add_argument("run", metavar="RUN", help="the run's folder or URL")
    command.add_argument(
        "sql", metavar="SQL", nargs="?", default=None, help="default: count and mean reward of each step"
    )
    for name, text in {"worst": "lowest", "best": "highest"}.items():
        samples = {"nargs": "?", "type": int, "const": _SAMPLES, "metavar": "N"}
        command.add_argument(f"--{name}", help=f"the N samples of the {text} reward (default: {_SAMPLES})", **samples)  # type: ignore[arg-type]
    command.add_argument(
        "--by", metavar="COLUMN", action="append", default=[], help="mean reward, count and length of each value"
    )
    command.add_argument("--zero-variance", action="store_true", help="groups whose rewards are all equal, by step")
    command.add_argument("--lengths", action="store_true", help="histogram of response lengths, and what is truncated")
    command.add_argument("--mismatch", action="store_true", help="the sampler's log-probs against the trainer's")
    command.add_argument(
        "--diff", nargs=2, type=int, metavar=("THEN", "NOW"), help="the prompts that two steps share, then and now"
    )
    command.add_argument("--step", type=one_step, dest="steps", metavar="N", help="of this step alone")
    command.add_argument("--steps", type=steps_between, metavar="A:B", help="of steps A to B; either may be left out")
    command.add_argument("--table", default=TABLE, metavar="NAME", help="rollouts (default), validation or test")
    command.add_argument("--html", metavar="FILE", help="write the answers as one page; without a question, to all")
    command.add_argument("--incomplete", action="store_true", help="count steps under way or never finished as well")


def show_rollouts(asked: Namespace) -> None:
    """Print the answers to what was asked, or write them to a page. UserError for what cannot be answered."""
    chosen = any((asked.worst is not None, asked.best is not None, asked.by, asked.diff)) or any(
        (asked.zero_variance, asked.lengths, asked.mismatch)
    )
    if asked.sql is not None and chosen:
        raise ConfigError("give SQL or ready questions, not both")
    with open_rollouts(asked.run, table=asked.table, steps=asked.steps, incomplete=asked.incomplete) as rollouts:
        if asked.html is not None:
            if asked.sql is None and not chosen:
                asked = Namespace(**{**vars(asked), **_REPORT, "mismatch": can_mismatch(rollouts)})
            write_page(asked.html, f"{asked.run}, {asked.table}", list(_answers(rollouts, asked)))
            print(f"the answers are in {asked.html}")
        elif chosen:
            console = PipeConsole()
            for answer in _answers(rollouts, asked):
                print_answer(console, answer)
        else:
            print(printable(str(rollouts.sql(asked.sql or questions.overview_sql(rollouts)))))
        if rollouts.remark:
            print(rollouts.remark, file=sys.stderr)


def _answers(rollouts: Rollouts, asked: Namespace) -> Iterator[Answer]:
    if asked.sql is not None:
        yield Answer(asked.sql, rollouts.table(asked.sql))
    elif asked.html is not None:
        yield Answer("Samples and mean reward of each step", questions.overview(rollouts))
    for column in asked.by:
        yield Answer(f"By {column}", questions.by(rollouts, column))
    if asked.zero_variance:
        note = "Such a group has no advantage, and teaches nothing; reward is the mean of theirs."
        yield Answer("Groups whose rewards are all equal", questions.zero_variance(rollouts), note=note)
    if asked.lengths:
        yield Answer("Lengths of the responses, in tokens", questions.lengths(rollouts), Layout.HISTOGRAM)
    if asked.mismatch:
        note = (
            "Absolute difference of a token's two log-probs, and shares of tokens by the ratio of the trainer's "
            "probability before the update to the sampler's. What the policy learned in between is in it."
        )
        yield Answer("The sampler's log-probs against the trainer's", mismatch(rollouts), note=note)
    if asked.diff:
        then, now = asked.diff
        title = f"The same prompts in step {then} and in step {now}"
        yield Answer(title, questions.diff(rollouts, then, now), Layout.CHANGES)
    if asked.best is not None:
        yield Answer("Best samples", questions.best(rollouts, asked.best), Layout.SAMPLES)
    if asked.worst is not None:
        yield Answer("Worst samples", questions.worst(rollouts, asked.worst), Layout.SAMPLES)
