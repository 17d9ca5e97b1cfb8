"""A run that goes on elsewhere, in a thread or in another process: follow it, ask it, end it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Sequence
from enum import StrEnum
from html import escape
from importlib import import_module
from typing import Any

import pyarrow as pa
from dask.delayed import Delayed, delayed
from siirl_storage import absolute

from siirl_dask.driver.feed import RunFeed
from siirl_dask.errors import ConfigError, Interrupted, clause
from siirl_dask.observe import Record, Summary
from siirl_dask.runs.reader import Run
from siirl_dask.runs.samples.parts import SamplePart, common_schema, sample_parts
from siirl_dask.runs.samples.rollouts import TABLE
from siirl_dask.wording import redacted

Cancel = Callable[[bool], None]
"""Asks the run's driver to end it: at once if true, else after the step under way."""


class RunStatus(StrEnum):
    """State of a run."""

    STARTING = "starting"
    """No step is done yet."""
    RUNNING = "running"
    STOPPING = "stopping"
    """It was cancelled, and has not ended yet."""
    COMPLETE = "complete"
    INTERRUPTED = "interrupted"
    """It was cancelled, or its user has stopped it."""
    FAILED = "failed"


class RunHandle:
    """A run under way, as ``submit`` and ``attach`` return it.

    ``await handle`` or ``handle.result()`` gives its Summary, or raises what ended it: Interrupted
    where it was cancelled. ``async for record in handle`` and ``for record in handle`` give the
    metrics of each step and validation as they come, and end with the run.
    """

    def __init__(self, url: str, feed: RunFeed, cancel: Cancel) -> None:
        self.url = absolute(url)
        """The run's folder."""
        self._feed = feed
        self._cancel = cancel
        self._is_cancelled = False

    @property
    def status(self) -> RunStatus:
        """State of the run now."""
        end = self._feed.end
        if end.done():
            error = end.exception()
            if error is None:
                return RunStatus.COMPLETE
            if isinstance(error, Interrupted):
                return RunStatus.INTERRUPTED
            return RunStatus.FAILED
        if self._is_cancelled:
            return RunStatus.STOPPING
        if self._feed.last is None:
            return RunStatus.STARTING
        return RunStatus.RUNNING

    @property
    def run(self) -> Run:
        """The run's folder for questions, as ``open_run`` returns it; it has its files as they
        come.
        """
        return Run(self.url)

    @property
    def metrics(self) -> pa.Table:
        """Metrics so far as a table, one row per step, validation and test."""
        return self.run.metrics

    def done(self) -> bool:
        """Return whether the run has ended."""
        return self._feed.end.done()

    def result(self, timeout: float | None = None) -> Summary:
        """Wait for the run and return its summary, or raise what ended it. TimeoutError after
        ``timeout`` seconds.
        """
        return self._feed.end.result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the run and return what ended it; None where it is complete. TimeoutError after
        ``timeout`` seconds.
        """
        return self._feed.end.exception(timeout)

    def cancel(self, *, at_once: bool = False) -> None:
        """Have the run end after the step under way, with a checkpoint of it where the run writes
        any, or ``at_once`` without either. Returns immediately; ``submit`` goes on from there.
        """
        if self.done():
            return
        self._cancel(at_once)
        self._is_cancelled = True

    def rollout_tables(
        self, table: str = TABLE, steps: Sequence[int] | None = None
    ) -> list[Delayed]:
        """Return the samples of every step that is whole, or of ``steps``, as Arrow tables that
        Dask reads: one for each part that the run has committed, all with the columns of all of
        them. ``table`` may be ``validation``.

        DataError where no step is whole yet, and for a column of which no type holds all values.
        """
        parts = sample_parts(self.url, table=table, steps=steps)
        schema = common_schema(parts)
        return [delayed(_read, pure=True)(part, schema) for part in parts]

    def rollouts(self, table: str = TABLE, steps: Sequence[int] | None = None) -> Any:
        """Return the same as a dask.dataframe of Arrow-backed columns, with a partition for each
        part. ConfigError without the extra ``dataframe``.
        """
        try:
            dataframe = import_module("dask.dataframe")
        except ImportError as error:
            raise ConfigError(
                f"dask.dataframe cannot be imported: {clause(error)}. Install siirl_dask[dataframe], or "
                "take rollout_tables(), which needs no pandas"
            ) from error
        parts = sample_parts(self.url, table=table, steps=steps)
        schema = common_schema(parts)
        return dataframe.from_map(
            _frame,
            parts,
            schema=schema,
            meta=_as_frame(schema.empty_table()),
            label="siirl-rollouts",
        )

    def __iter__(self) -> Iterator[Record]:
        return iter(self._feed)

    def __aiter__(self) -> AsyncIterator[Record]:
        return self._feed.__aiter__()

    def __await__(self) -> Generator[Any, None, Summary]:
        # shielded: a task that waits may be cancelled, and the run goes on
        return asyncio.shield(asyncio.wrap_future(self._feed.end)).__await__()

    def __repr__(self) -> str:
        last = self._feed.last
        step = ""
        if last is not None:
            step = f", step {last['step']}"
        return f"<run {redacted(self.url)}: {self.status}{step}>"

    def _repr_html_(self) -> str:
        return f"<code>{escape(repr(self))}</code>"


def _read(part: SamplePart, schema: pa.Schema) -> pa.Table:
    return part.read(schema)


def _frame(part: SamplePart, schema: pa.Schema) -> Any:
    return _as_frame(part.read(schema))


def _as_frame(table: pa.Table) -> Any:
    """Return a table as a dataframe whose columns are Arrow's, so that lists stay lists."""
    pandas = import_module("pandas")
    return table.to_pandas(types_mapper=pandas.ArrowDtype)
