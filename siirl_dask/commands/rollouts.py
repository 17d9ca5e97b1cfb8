"""``siirl-dask rollouts``: asks a run's samples, in SQL or one of the ready questions, and shows
the answers.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from functools import partial

from siirl_dask.commands.options.steps import one_step, steps_between
from siirl_dask.errors import ConfigError
from siirl_dask.observe import PipeConsole, printable
from siirl_dask.runs.reader import decoder_of_run
from siirl_dask.runs.samples import questions
from siirl_dask.runs.samples.conversations import spoken_columns
from siirl_dask.runs.samples.mismatch import can_mismatch, mismatch
from siirl_dask.runs.samples.prompt_images import StoredPromptImages
from siirl_dask.runs.samples.rollouts import TABLE, Rollouts, as_data_error, open_rollouts
from siirl_dask.schema import TURNS
from siirl_dask.views.samples.answer import AnswerLayout, QueryResult
from siirl_dask.views.samples.page import write_page
from siirl_dask.views.samples.terminal import print_answer
from siirl_dask.wording import redacted

_SAMPLES = 5
_CHOSEN = {
    "worst": "samples of the lowest reward",
    "best": "samples of the highest reward",
    "longest": "samples of the most tokens",
    "failed": "newest episodes in which an environment failed",
}
_REPORT = {"zero_variance": True, "lengths": True, "best": _SAMPLES, "worst": _SAMPLES}
"""The questions of a page for which none was asked, with those of mismatch and turns where there
are such columns."""

_ORDER = {
    "best": questions.best,
    "worst": questions.worst,
    "longest": questions.longest,
    "failed": questions.failed,
}


def add_questions(command: ArgumentParser) -> None:
    """Add the arguments of the command."""
    command.add_argument("run", metavar="RUN", help="the run's folder or URL")
    command.add_argument(
        "sql",
        metavar="SQL",
        nargs="?",
        default=None,
        help="default: count and mean reward of each step",
    )
    for name, text in _CHOSEN.items():
        samples = {"nargs": "?", "type": int, "const": _SAMPLES, "metavar": "N"}
        command.add_argument(f"--{name}", help=f"the N {text} (default: {_SAMPLES})", **samples)  # type: ignore[arg-type]
    command.add_argument(
        "--by",
        metavar="COLUMN",
        action="append",
        default=[],
        help="mean reward, count and length of each value",
    )
    command.add_argument(
        "--zero-variance", action="store_true", help="groups whose rewards are all equal, by step"
    )
    command.add_argument(
        "--turns", action="store_true", help="mean reward, count and length by the number of turns"
    )
    command.add_argument(
        "--lengths",
        action="store_true",
        help="histogram of response lengths, and what is truncated",
    )
    command.add_argument(
        "--mismatch", action="store_true", help="the sampler's log-probs against the trainer's"
    )
    command.add_argument(
        "--diff",
        nargs=2,
        type=int,
        metavar=("THEN", "NOW"),
        help="the prompts that two steps share, then and now",
    )
    command.add_argument(
        "--step",
        type=one_step,
        dest="steps",
        metavar="N",
        help="of this step alone",
    )
    command.add_argument(
        "--steps",
        type=steps_between,
        metavar="A:B",
        help="of steps A to B; either may be left out",
    )
    command.add_argument(
        "--table",
        default=TABLE,
        metavar="NAME",
        help="rollouts (default), validation or test",
    )
    command.add_argument(
        "--full", action="store_true", help="prompts and responses as the model saw them, uncut"
    )
    command.add_argument(
        "--html", metavar="FILE", help="write the answers as one page; without a question, to all"
    )
    command.add_argument(
        "--incomplete", action="store_true", help="count steps under way or never finished as well"
    )


def show_rollouts(asked: Namespace) -> None:
    """Print the answers to what was asked, or write them to a page. UserError for what cannot be
    answered.
    """
    chosen = _asks_ready_question(asked)
    if asked.sql is not None and chosen:
        raise ConfigError("give SQL or ready questions, not both")
    with open_rollouts(
        asked.run,
        table=asked.table,
        steps=asked.steps,
        incomplete=asked.incomplete,
    ) as rollouts:
        rollouts.interruptibly(partial(_show, rollouts, asked, chosen=chosen))
        if rollouts.remark:
            print(rollouts.remark, file=sys.stderr)


def _asks_ready_question(asked: Namespace) -> bool:
    if any(getattr(asked, name) is not None for name in _CHOSEN):
        return True
    return any(
        (asked.by, asked.diff, asked.zero_variance, asked.turns, asked.lengths, asked.mismatch)
    )


def _show(rollouts: Rollouts, asked: Namespace, *, chosen: bool) -> None:
    """Print the answers, or write them to a page; ``chosen``: to ready questions."""
    if asked.html is not None:
        if asked.sql is None and not chosen:
            there = {
                "mismatch": can_mismatch(rollouts),
                "turns": TURNS in rollouts.schema.names,
            }
            asked = Namespace(**{**vars(asked), **_REPORT, **there})
        write_page(
            asked.html, f"{redacted(asked.run)}, {asked.table}", list(_answers(rollouts, asked))
        )
        print(f"the answers are in {asked.html}")
    elif chosen:
        console = PipeConsole()
        for answer in _answers(rollouts, asked):
            print_answer(console, answer, full=asked.full)
    else:
        with as_data_error():
            text = str(rollouts.sql(asked.sql or questions.overview_sql(rollouts)))
        print(printable(text))


def _answers(rollouts: Rollouts, asked: Namespace) -> Iterator[QueryResult]:
    if asked.sql is not None:
        yield QueryResult(asked.sql, rollouts.table(asked.sql))
    elif asked.html is not None:
        yield QueryResult("Samples and mean reward of each step", questions.overview(rollouts))
    images = StoredPromptImages(asked.run, asked.table, thumbnails=asked.html is not None)
    for column in asked.by:
        yield QueryResult(f"By {column}", questions.by(rollouts, column))
    if asked.zero_variance:
        note = "Such a group has no advantage, and teaches nothing; reward is the mean of theirs."
        yield QueryResult(
            "Groups whose rewards are all equal", questions.zero_variance(rollouts), note=note
        )
    if asked.turns:
        yield QueryResult("By number of turns", questions.by_turns(rollouts))
    if asked.lengths:
        yield QueryResult(
            "Lengths of the responses, in tokens",
            questions.lengths(rollouts),
            AnswerLayout.HISTOGRAM,
        )
    if asked.mismatch:
        note = (
            "Absolute difference of a token's two log-probs, and shares of tokens by the ratio of "
            "the trainer's probability before the update to the sampler's. What the policy learned "
            "in between is in it."
        )
        yield QueryResult(
            "The sampler's log-probs against the trainer's", mismatch(rollouts), note=note
        )
    if asked.diff:
        then, now = asked.diff
        title = f"The same prompts in step {then} and in step {now}"
        yield QueryResult(
            title,
            images.added_to(questions.diff(rollouts, then, now, full=asked.full)),
            AnswerLayout.CHANGES,
        )
    wanted = {name: count for name in _ORDER if (count := getattr(asked, name)) is not None}
    decode = None
    if wanted and spoken_columns(rollouts):
        decode = decoder_of_run(asked.run)
    for name, count in wanted.items():
        samples = images.added_to(_ORDER[name](rollouts, count, decode, full=asked.full))
        yield QueryResult(f"{name.capitalize()} samples", samples, AnswerLayout.SAMPLES)
