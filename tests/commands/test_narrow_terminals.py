"""Terminals of 60 columns: tables fit, columns go where there is no room, and no number is cut."""

import re
from io import StringIO

import pytest
from rich.console import Console

from siirl_dask.commands.trace import print_bottleneck
from siirl_dask.observe.trace.bottleneck import find_bottleneck
from siirl_dask.runs.trace import read_trace
from siirl_dask.views.watch.look import Watcher
from siirl_dask.views.watch.screen import screen
from siirl_dask.wording import table, tables_within
from tests.written_runs import whole_run

HEADER = ("edge", "rows", "workers", "bytes", "columns")
ROWS = [
    ("prompts -> rollout", "32 anywhere", "local", "-", "prompt, answer, prompt_ids, prompt_text"),
    (
        "rollout -> old_logprobs",
        "1,256 balanced by minibatch",
        "w0..w511 (512) -> w512..w1023 (512)",
        "<= 123,455.3 kB",
        "prompt_ids, response_ids, rollout_logprobs, weights_version, finish_reason",
    ),
]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return whole_run(tmp_path_factory.mktemp("run") / "mine")


def printed(width, show):
    """Return the text that a console of a terminal so wide prints."""
    console = Console(
        file=StringIO(), width=width, force_terminal=True, color_system=None, legacy_windows=False
    )
    show(console)
    return console.file.getvalue()


def drawn_lines(text):
    """The lines of the tables, which begin with a space and have three between columns."""
    return [line for line in text.splitlines() if re.match(r" .*\S {3,}\S", line)]


@pytest.mark.parametrize("width", [60, 72, 100])
def test_a_plans_table_fits_and_cuts_no_word(width):
    with tables_within(width):
        text = table(HEADER, ROWS)
    assert max(map(len, text.splitlines())) <= width
    words = {word for row in [HEADER, *ROWS] for cell in row for word in cell.split()}
    assert words == set(text.split())


def test_a_plans_table_is_as_wide_as_ever_where_nothing_is_narrow():
    with tables_within(10_000):
        assert table(HEADER, ROWS) == table(HEADER, ROWS)
    wide = table(HEADER, ROWS)
    with tables_within(60):
        assert len(table(HEADER, ROWS).splitlines()) > len(wide.splitlines())
    assert table(HEADER, ROWS) == wide


@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_screen_of_watch_cuts_no_number(width, run):
    look = Watcher(run).look(0.0)
    text = printed(width, lambda console: console.print(screen(look, width)))
    lines = drawn_lines(text)
    assert len(lines) > 4
    assert max(map(len, text.splitlines())) <= width
    assert not [line for line in lines if re.search(r"\d…", line)]
    assert ("▁" in text) == (width > 60)


def test_the_screen_of_watch_keeps_the_newest_value_on_the_narrowest_terminal(run):
    look = Watcher(run).look(0.0)
    wide = printed(120, lambda console: console.print(screen(look, 120)))
    narrow = printed(40, lambda console: console.print(screen(look, 40)))
    newest = [re.split(r" {3,}", line.strip())[1] for line in drawn_lines(wide) if "▁" in line]
    shown = [line.split()[-1] for line in drawn_lines(narrow)]
    assert newest
    assert [value for value in shown if value in newest][: len(newest)] == newest


@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_tables_of_trace_cut_no_number(width, run):
    trace = read_trace(run, None)
    found = find_bottleneck(trace.spans)
    text = printed(width, lambda console: print_bottleneck(console, trace, found))
    assert "…" not in text
    assert max(map(len, drawn_lines(text))) <= width
    assert ("received a step" in text) == (width > 60)
    assert "waits most" in text
