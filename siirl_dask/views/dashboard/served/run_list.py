"""The list of the runs in a folder: which there are, how each ended, and what to compare."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from urllib.parse import urlencode

from siirl_storage import StorageError, join, open_fs

from siirl_dask.errors import ConfigError, DataError, SiirlError, counted
from siirl_dask.observe import Record, Summary, read_summary
from siirl_dask.planner import Phase
from siirl_dask.runs.attempt import RunStart, newest_start
from siirl_dask.runs.folder import CONFIG_FILE
from siirl_dask.views.charts.figures import duration, number
from siirl_dask.views.dashboard.neighbours import metrics_tail
from siirl_dask.views.html_page import html_page, safe, table
from siirl_dask.wording import redacted

MOST_COMPARED = 16
_MOST_RUNS = 200
# of a run under way: the newest steps, and mostly a validation among them
_NEWEST_BYTES = 2**18
_NEWEST_RECORDS = 200
_STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; margin: 1.2rem auto; max-width: 72rem; padding: 0 1rem; }
h1 { font-size: 1.2rem; overflow-wrap: anywhere; } .scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; }
th, td { padding: .3rem .7rem; text-align: right; border-bottom: 1px solid #8884; white-space: nowrap; }
td:first-child, th:first-child, .left { text-align: left; }
a { color: #3a86c8; } .failed, .gone { color: #d64541; } .complete { color: #2f9e62; } .note { color: #888; }
button { font: inherit; padding: .3rem .9rem; margin: .8rem 0; }
"""


def runs_in(url: str) -> list[str]:
    """Return the names of the folders in ``url`` that hold a run, in alphabetical order.

    ConfigError for a folder that cannot be listed. Of more than 200 folders the first ones in the
    alphabet count.
    """
    try:
        fs, path = open_fs(url)
        folders = sorted(
            str(entry["name"]).rstrip("/")
            for entry in fs.ls(path, detail=True)
            if entry.get("type") == "directory"
        )[:_MOST_RUNS]
        found = [folder for folder in folders if fs.exists(f"{folder}/{CONFIG_FILE}")]
    except StorageError as error:
        raise ConfigError(str(error)) from error
    except FileNotFoundError:
        return []
    except Exception as error:  # each store has errors of its own: no credentials, no connection
        raise ConfigError(f"{url!r} cannot be listed: {type(error).__name__}: {error}") from error
    names = [folder.rpartition("/")[2] for folder in found]
    # a browser cannot ask for a name that is no text
    return [name for name in names if name.encode(errors="replace").decode() == name]


@dataclass(frozen=True, slots=True)
class ListedRun:
    """A line of the list."""

    name: str
    summary: Summary | None
    start: RunStart | None
    newest: Sequence[Record] = ()
    """Records of the newest steps of a run under way."""
    problem: str = ""

    @property
    def goes_on(self) -> bool:
        """Whether the run is under way."""
        if self.start is None:
            return False
        return not self.start.is_over


def list_page(url: str, names: Sequence[str]) -> str:
    """Return the list as a page of HTML that loads and runs nothing."""
    runs = [_listed(join(url, name), name) for name in names]
    runs.sort(key=lambda run: "" if run.start is None else run.start.owner.started, reverse=True)
    heads = ("run", "how it ended", "steps", "validation", "test", "time", "begun")
    body = table(heads, [tuple(_cells(run)) for run in runs], texts=(1, 6))
    shown = redacted(url)
    return html_page(
        f"runs in {shown}",
        _STYLE,
        f"<h1>Runs in {safe(shown)}</h1><form action='compare'>{body}"
        "<button>compare the selected runs</button></form>"
        f"<p class='note'>{counted(len(runs), 'run')}, the newest first; up to {MOST_COMPARED} are compared "
        "at once.</p>",
    )


def run_address(name: str) -> str:
    """Return the address of a run's page, below that of the list."""
    return f"run?{urlencode({'name': name})}"


def _listed(url: str, name: str) -> ListedRun:
    try:
        start = newest_start(url)
    except (SiirlError, StorageError, OSError) as error:
        return ListedRun(name, None, None, problem=redacted(str(error)))
    try:
        run = ListedRun(name, _summary(url), start)
        if not run.goes_on:
            return run
        return replace(run, newest=metrics_tail(url, _NEWEST_RECORDS, _NEWEST_BYTES))
    except (SiirlError, StorageError, OSError) as error:
        return ListedRun(name, None, start, problem=redacted(str(error)))


def _summary(url: str) -> Summary | None:
    """Return how a run ended; None where it goes on, was killed, or its summary is damaged."""
    try:
        return read_summary(url)
    except DataError:
        return None


def _cells(run: ListedRun) -> Iterator[str]:
    box = f"<input type='checkbox' name='name' value='{safe(run.name)}' aria-label='compare'>"
    yield f"{box} <a href='{safe(run_address(run.name))}'>{safe(run.name)}</a>"
    if run.problem:
        yield f"<span class='failed'>{safe(run.problem[:80])}</span>"
        yield from ("", "", "", "")
    elif run.goes_on:
        yield "under way"
        yield from _progress(run.newest)
    elif run.summary is None:
        yield "<span class='gone'>it has not said</span>"
        yield from ("", "", "", "")
    else:
        yield f"<span class='{run.summary.status}'>{run.summary.status}</span>"
        yield from _results(run.summary)
    yield "" if run.start is None else safe(run.start.owner.started)


def _progress(newest: Sequence[Record]) -> Iterator[str]:
    """Yield steps and the last validation of a run under way, and nothing of what it does not
    know yet.
    """
    trained = [record["step"] for record in newest if record["phase"] is Phase.TRAIN]
    yield f"{trained[-1]:,}" if trained else ""
    scores = [
        record["metrics"].get("reward/mean")
        for record in newest
        if record["phase"] is Phase.VALIDATION
    ]
    yield number(scores[-1]) if scores else ""
    yield from ("", "")


def _results(summary: Summary) -> Iterator[str]:
    """Yield steps, validations, test and seconds of a run that has ended."""
    scores = summary.validation
    yield f"{summary.steps:,}"
    if scores.first is None and scores.last is None:
        yield ""
    else:
        yield f"{number(scores.first)} &rarr; {number(scores.last)}"
    yield "" if scores.test is None else number(scores.test)
    yield duration(summary.seconds)
