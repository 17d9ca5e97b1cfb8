"""Collects what a report says of a run, from its URL alone.

A part that cannot be read is named with the reason; the report has the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from siirl_storage import StorageError

from siirl_dask.config import Config
from siirl_dask.errors import ConfigError, DataError, SiirlError
from siirl_dask.observe import Record, Summary, read_attempts
from siirl_dask.observe.trace.bottleneck import Bottleneck, find_bottleneck
from siirl_dask.observe.trace.step_averages import Measured, measure, usual_step
from siirl_dask.observe.trace.trace_table import TraceSpan
from siirl_dask.planner import Phase
from siirl_dask.runs.attempt import RunStart, starts_of
from siirl_dask.runs.reader import Run, decoder_of_run, open_run
from siirl_dask.runs.samples import questions
from siirl_dask.runs.samples.conversations import spoken_columns
from siirl_dask.runs.samples.prompt_images import StoredPromptImages
from siirl_dask.runs.samples.rollouts import open_rollouts
from siirl_dask.runs.trace import read_recent
from siirl_dask.views.samples.answer import summary as changes_in_words
from siirl_dask.wording import redacted

_STARTS = 100
_PAIRS = 6  # validation prompts
_EACH = 2  # best and worst samples of each


@dataclass(frozen=True, slots=True)
class StepTiming:
    """Timing of a run's newest steps, by its trace."""

    steps: Sequence[int]
    bottleneck: Bottleneck
    measured: Measured | None
    """None where the steps were no training."""
    step: Sequence[TraceSpan]
    """Spans of the chains in a training step of median length."""


@dataclass(frozen=True, slots=True)
class Samples:
    """Validation prompts before and after, or samples of the last step where there is no
    validation.
    """

    then: int
    now: int
    words: str = ""
    """How many prompts' rewards rose and fell."""
    pairs: Sequence[Mapping[str, Any]] = ()
    """Rows of ``questions.diff``."""
    best: Sequence[Mapping[str, Any]] = ()
    worst: Sequence[Mapping[str, Any]] = ()


@dataclass(frozen=True, slots=True)
class RunFacts:
    """A run, as far as it can be read."""

    url: str
    label: str
    """Name of the run; unlike those of the other runs."""
    config: Config | None = None
    dag: Mapping[str, Any] = field(default_factory=lambda: {"roles": {}, "nodes": []})
    attempts: Sequence[tuple[Record, int]] = ()
    """Records by step, each with the number of the start that wrote it."""
    summary: Summary | None = None
    starts: Sequence[RunStart] = ()
    timing: StepTiming | None = None
    samples: Samples | None = None
    missing: Mapping[str, str] = field(default_factory=dict)
    """Why a part is not there, by the part: configuration, DAG, metrics, summary, trace,
    samples, starts."""

    @property
    def records(self) -> list[Record]:
        """Records by step."""
        return [record for record, _ in self.attempts]

    @property
    def steps(self) -> int:
        """Steps trained."""
        return max(
            (record["step"] for record, _ in self.attempts if record["phase"] == Phase.TRAIN),
            default=0,
        )


def gather(urls: Sequence[str]) -> list[RunFacts]:
    """Return the facts of each run. ConfigError where there is no run, before anything else is
    read.
    """
    if len(set(urls)) < len(urls):
        twice = next(url for url in urls if urls.count(url) > 1)
        raise ConfigError(f"{twice!r} is given twice: expected different runs")
    found = [_facts(run) for run in [open_run(url) for url in urls]]
    names = [run.label for run in found]
    folders = _distinct_folders([run.url for run in found])
    return [
        run if names.count(run.label) == 1 else replace(run, label=folder)
        for run, folder in zip(found, folders, strict=True)
    ]


def _distinct_folders(urls: Sequence[str]) -> list[str]:
    """Return of each URL as many last folders as tell all of them apart: ``run-1``, or
    ``sweep/run-1``; whole URLs where none do.
    """
    shown = [redacted(url) for url in urls]
    parts = [url.rstrip("/").split("/") for url in shown]
    for depth in range(1, max(map(len, parts))):
        ends = ["/".join(part[-depth:]) for part in parts]
        if len(set(ends)) == len(ends):
            return ends
    return shown


def _facts(run: Run) -> RunFacts:
    missing: dict[str, str] = {}

    @contextmanager
    def part(name: str) -> Iterator[None]:
        try:
            yield
        except (SiirlError, StorageError, OSError) as error:
            missing[name] = redacted(str(error))

    found: dict[str, Any] = {}
    read: dict[str, tuple[str, Callable[[], Any]]] = {
        "config": ("configuration", lambda: run.config),
        "dag": ("DAG", lambda: run.dag),
        "attempts": ("metrics", lambda: read_attempts(run.url)),
        "summary": ("summary", lambda: run.summary),
        "starts": ("starts", lambda: starts_of(run.url, _STARTS)),
        "timing": ("trace", lambda: _timing(run.url)),
        "samples": ("samples", lambda: _samples(run.url)),
    }
    for field_name, (words, reading) in read.items():
        with part(words):
            found[field_name] = reading()
    config = found.get("config")
    label = run.url.rstrip("/").rpartition("/")[2]
    if config:
        label = config.run.name
    return RunFacts(run.url, label, missing=missing, **found)


def _timing(url: str) -> StepTiming:
    trace = read_recent(url)
    return StepTiming(
        trace.steps, find_bottleneck(trace.spans), measure(trace.spans), usual_step(trace.spans)
    )


def _samples(url: str) -> Samples:
    try:
        return _validated(url)
    except DataError:
        return _trained(url)


def _validated(url: str) -> Samples:
    """Return the validation prompts whose rewards changed most. DataError with fewer than two
    validations.
    """
    with open_rollouts(url, table="validation") as rollouts:
        then = min(rollouts.files)
        now = max(rollouts.files)
        if then == now:
            raise DataError("there is one validation")
        changes = questions.diff(rollouts, then, now)
        words = changes_in_words(changes.select(["then", "now", "change"]).to_pylist())
        pairs = StoredPromptImages(url, "validation", thumbnails=True).added_to(
            changes.slice(0, _PAIRS)
        )
        return Samples(then, now, words, pairs.to_pylist())


def _trained(url: str) -> Samples:
    """Return the best and the worst samples of the last step that is saved."""
    with open_rollouts(url) as rollouts:
        last = max(rollouts.files)
    with open_rollouts(url, steps=range(last, last + 1)) as rollouts:
        decode = None
        if spoken_columns(rollouts):
            decode = decoder_of_run(url)
        images = StoredPromptImages(url, thumbnails=True)
        asked = (ask(rollouts, _EACH, decode) for ask in (questions.best, questions.worst))
        best, worst = (images.added_to(samples).to_pylist() for samples in asked)
    return Samples(last, last, best=best, worst=worst)
