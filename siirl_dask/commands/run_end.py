"""Prints what came of a run, where it lies and what to type next: the same for `run`, `quickstart`
and pipeline scripts.
"""

from __future__ import annotations

import logging
import os
import shlex
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from siirl_storage import join, open_fs

from siirl_dask.config import Config
from siirl_dask.errors import DataError
from siirl_dask.observe import (
    EndOfRun,
    PipeConsole,
    Sample,
    Summary,
    print_end_of_run,
    read_metrics,
)
from siirl_dask.planner import Phase
from siirl_dask.runs.checkpoints import committed
from siirl_dask.runs.samples import questions
from siirl_dask.runs.samples.rollouts import TABLE, open_newest
from siirl_dask.views.charts.series import series_of
from siirl_dask.views.samples.answer import summary as changes_in_words
from siirl_dask.wording import redacted

logger = logging.getLogger("siirl_dask.commands")
_STEPS = 5  # at most, at each end of a run, whose mean reward is shown
_SHOWN = 3  # validation prompts
_FILES = {
    "every sample": TABLE,
    "validation": "validation",
    "checkpoints": "checkpoints",
    "metrics": "metrics.jsonl",
    "summary": "summary.json",
    "plot": "plot.svg",
}


def print_run_end(
    config: Config, summary: Summary, next_lines: Mapping[str, str] | None = None
) -> None:
    """Print how a run that is complete ended; ``next_lines`` are commands besides the usual ones,
    by what they show.
    """
    url = config.run.url
    try:
        found = _found(config)
    except Exception as error:  # each store has errors of its own; the run itself is complete
        logger.warning("%s cannot be read again: %s: %s", url, type(error).__name__, error)
        found = _Found()
    ended = EndOfRun(
        summary=summary,
        files={"run": redacted(url), **found.files},
        first_reward=found.first_reward,
        last_reward=found.last_reward,
        before=found.before,
        after=found.after,
        changes=found.changes,
        next_lines={**_next_lines(config, found), **(next_lines or {})},
    )
    print_end_of_run(PipeConsole(), ended)


def program() -> str:
    """Return the name by which the user can start this program here."""
    own = Path(sys.argv[0])
    if shutil.which("siirl-dask") is None and own.name == "siirl-dask":
        return os.path.relpath(own)
    return "siirl-dask"


@dataclass(slots=True)
class _Found:
    """Files and figures of the run's folder."""

    files: dict[str, str] = field(default_factory=dict)
    first_reward: float | None = None
    last_reward: float | None = None
    before: list[Sample] = field(default_factory=list)
    after: list[Sample] = field(default_factory=list)
    changes: str = ""
    has_checkpoint: bool = False


def _found(config: Config) -> _Found:
    url = config.run.url
    fs, path = open_fs(url)
    names = {str(name).rstrip("/").rpartition("/")[2] for name in fs.ls(path, detail=False)}
    found = _Found(
        files={words: redacted(join(url, name)) for words, name in _FILES.items() if name in names},
        has_checkpoint=bool(committed(url)),
    )
    rewards = [value for _, value in series_of(read_metrics(url), Phase.TRAIN, "reward/mean")]
    if rewards:
        count = max(1, min(_STEPS, len(rewards) // 2))  # no step is at both ends
        found.last_reward = sum(rewards[-count:]) / count
        if len(rewards) > 1:
            found.first_reward = sum(rewards[:count]) / count
    if config.validation.url is not None:
        _add_validation(found, url, config.run.steps)
    return found


def _add_validation(found: _Found, url: str, last: int) -> None:
    """Add the validation prompts whose rewards changed most, as far as few bytes have them."""
    try:
        with open_newest(url, [0, last], table="validation") as rollouts:
            if rollouts is None:
                return
            changes = questions.diff(rollouts, 0, last)
    except DataError as error:
        logger.info("no validation samples are shown: %s", error)
        return
    found.changes = changes_in_words(changes.select(["then", "now", "change"]).to_pylist())
    rows = changes.to_pylist()
    rose = [row for row in rows if row["change"] > 0][: _SHOWN - 1]
    others = [row for row in rows if row["change"] <= 0][: _SHOWN - len(rose)]
    for row in [*rose, *others]:
        asked = {"prompt": row["prompt"], "answer": row["answer"]}
        found.before.append({**asked, "response": row["then_response"], "reward": row["then"]})
        found.after.append({**asked, "response": row["now_response"], "reward": row["now"]})


def _next_lines(config: Config, found: _Found) -> dict[str, str]:
    url = redacted(config.run.url)
    words = {}
    if "every sample" in found.files:
        words["its worst samples"] = ["rollouts", url, "--worst"]
    words["its page"] = ["serve", url]
    words["one file to send"] = ["report", url]
    data = config.validation.test_url
    if data is None:
        data = config.validation.url
    if found.has_checkpoint:
        if data is not None:
            words["its score"] = ["eval", url, "--data", redacted(data), "--n", "4"]
        words["its model"] = ["export", url, f"models/{config.run.name}"]
    return {name: shlex.join([program(), *line]) for name, line in words.items()}
