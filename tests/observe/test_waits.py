"""Workers that come are shown: whole lines in a CI log, one line in place on a terminal."""

import io

import pytest
from rich.console import Console

from siirl_dask.observe import Progress


@pytest.fixture
def shown(monkeypatch):
    """Return the text that is printed while workers come: ``shown({second: came, ...}, of=4)``."""

    def shown(came, of=4, terminal=False, enabled=True):
        now = [0.0]
        monkeypatch.setattr("siirl_dask.observe.waits.time.monotonic", lambda: now[0])
        console = Console(
            file=io.StringIO(), force_terminal=terminal, width=80, color_system=None, _environ={}
        )
        with Progress(1, console, enabled).arrivals(of) as show:
            for second, count in came.items():
                now[0] = second
                show(count)
        return console.file.getvalue()

    return shown


def test_workers_that_come_at_once_are_not_worth_a_line(shown):
    assert shown({0: 0, 1: 2, 3: 4}) == ""


def test_a_log_gets_a_line_every_few_seconds_and_one_at_the_end(shown):
    text = shown(dict.fromkeys(range(20), 0) | {20: 1, 21: 2, 22: 3, 27: 3, 28: 4})
    assert text.splitlines() == [f"{came} of 4 workers came" for came in (0, 1, 3, 4)]


def test_a_long_wait_says_something_every_minute(shown):
    assert shown(dict.fromkeys(range(200), 0)).count("\n") == 4


def test_a_terminal_shows_them_in_place_and_is_clean_afterwards(shown):
    text = shown({0: 0, 1: 2}, terminal=True)
    assert "2 of 4 workers came" in text or "0 of 4 workers came" in text
    assert text.endswith("\x1b[2K")


def test_nothing_is_shown_where_progress_is_turned_off(shown):
    assert shown(dict.fromkeys(range(200), 0), enabled=False) == ""
