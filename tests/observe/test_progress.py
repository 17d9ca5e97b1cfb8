"""Progress: readable in a CI log, readable on a terminal, and absent when turned off."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from siirl_dask.observe import Progress, Record
from siirl_dask.observe.progress import Pace, StepShare, headline, time_left
from siirl_dask.observe.tenths import Tenths


def console(terminal: bool, width: int = 80) -> Console:
    return Console(
        file=io.StringIO(), force_terminal=terminal, width=width, color_system=None, _environ={}
    )


def text_of(progress: Progress) -> str:
    file = progress._console.file
    assert isinstance(file, io.StringIO)
    return file.getvalue()


def run(progress: Progress, steps: int) -> str:
    progress.start("http://127.0.0.1:8787/status", "runs/a")
    for step in range(1, steps + 1):
        metrics: dict[str, float | None] = {"reward/mean": step / 100, "tokens_per_second": 12345.6}
        progress.step(Record(step=step, phase="train", seconds=0.1, metrics=metrics))
    progress.validation(steps, {"reward/mean": 0.8125, "samples": 256.0})
    progress.close()
    progress.close()
    return text_of(progress)


def test_a_ci_log_gets_whole_lines_few_of_them_and_no_escape_codes():
    text = run(Progress(100, console(terminal=False)), 100)
    lines = text.splitlines()
    assert "\x1b" not in text
    assert "\r" not in text
    assert "dashboard  http://127.0.0.1:8787/status" in lines
    steps = [line for line in lines if line.startswith("step ")]
    assert len(steps) == 21
    assert steps[0].startswith("step 1/100  reward 0.010  12,346 tokens/s")
    assert steps[-1].startswith("step 100/100")
    assert "validation  step 100  accuracy 0.8125  (256 prompts)" in lines


def test_a_long_line_is_not_broken_in_a_ci_log():
    progress = Progress(1, console(terminal=False, width=20))
    progress.note("s3://bucket/a/very/long/path/that/someone/copies")
    assert text_of(progress) == "s3://bucket/a/very/long/path/that/someone/copies\n"


def test_a_slow_run_says_something_every_minute_in_a_ci_log(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("siirl_dask.observe.progress.time.monotonic", lambda: now[0])
    progress = Progress(10_000, console(terminal=False))
    progress.start(None, "runs/a")
    for step in range(1, 11):
        now[0] += 30
        progress.step(Record(step=step, phase="train", seconds=30.0, metrics={}))
    assert text_of(progress).count("step ") >= 5


def test_a_terminal_gets_a_bar_with_step_reward_speed_and_time_left():
    text = run(Progress(4, console(terminal=True, width=120)), 4)
    last = [line for line in text.replace("\r", "\n").splitlines() if "step 4/4" in line][-1]
    for part in ("━━━", "reward 0.040", "12,346 tokens/s", "0:00 left"):
        assert part in last
    assert "validation  step 4  accuracy 0.8125  (256 prompts)" in text


def test_the_share_of_a_step_is_that_of_its_time_as_the_step_before_spent_it():
    """Ninety things in a second, then ten rows whose reward takes a second each."""
    share = StepShare(now=100.0)
    assert [
        share.count(beats, 100.0 + seconds) for beats, seconds in ((90, 1.0), (95, 6.0), (99, 10.0))
    ] == [0, 0, 0]
    share.count(100, 111.0)
    share.end_step(now=111.0)
    shares = [share.count(beats, 0.0) for beats in (100, 145, 190, 195, 250)]
    assert shares == pytest.approx([0, 0.5 / 11, 1 / 11, 6 / 11, 0.99])
    assert share.count(3, 0.0) < 0.01  # the run is tried again


def test_the_bar_moves_within_a_step_and_counts_only_whole_ones(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("siirl_dask.observe.progress.time.monotonic", lambda: now[0])
    progress = Progress(4, console(terminal=True, width=120))
    progress.start(None, "runs/a")
    done = []
    for step in (1, 2):
        for beats in (10, 50, 90):
            now[0] = 10.0 * (step - 1) + beats / 10
            progress.under_way((step - 1) * 100 + beats, f"node 'rollout', train step {step}")
            done.append(progress._bar.tasks[0].completed)
        now[0] = 10.0 * step
        progress.under_way(step * 100, f"node 'update', train step {step}")
        progress.step(Record(step=step, phase="train", seconds=0.1, metrics={"reward/mean": 0.5}))
        done.append(progress._bar.tasks[0].completed)
    # the first step tells how much is in one
    assert done == pytest.approx([0, 0, 0, 1, 1.1, 1.5, 1.9, 2])
    progress.under_way(290, "node 'rollout', train step 3")
    progress._bar.refresh()
    last = text_of(progress).replace("\r", "\n").splitlines()[-1]
    progress.close()
    assert "step 2/4" in last
    assert "reward 0.500  node 'rollout', train step 3" in last


def test_a_long_step_and_a_long_start_say_where_they_are_in_a_ci_log(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("siirl_dask.observe.progress.time.monotonic", lambda: now[0])
    progress = Progress(3, console(terminal=False))
    for beats in range(8):
        now[0] += 4
        progress.under_way(beats, "the building of role 'rollout': vLLM loads the weights")
    assert (
        text_of(progress).splitlines()
        == ["starting   the building of role 'rollout': vLLM loads the weights"] * 2
    )
    progress.start(None, "runs/a")
    for beats in (7, 107):
        progress.under_way(beats, "node 'rollout', train step 1")
        now[0] += 10
    progress.step(Record(step=1, phase="train", seconds=0.1, metrics={}))
    for beats in range(127, 177, 10):
        now[0] += 30
        progress.under_way(beats, "node 'rollout', train step 2")
    assert text_of(progress).splitlines()[4:] == [
        "in step    2/3  15% done, node 'rollout', train step 2",
        "in step    2/3  25% done, node 'rollout', train step 2",
    ]


@pytest.mark.parametrize("terminal", [False, True])
def test_disabled_prints_nothing_at_all(terminal):
    assert run(Progress(4, console(terminal), enabled=False), 4) == ""


def test_a_dag_that_logs_neither_reward_nor_samples_is_no_error():
    progress = Progress(2, console(terminal=False))
    progress.start(None, "runs/a")
    progress.step(Record(step=1, phase="train", seconds=0.1, metrics={"reward/mean": None}))
    progress.validation(1, {})
    assert "validation  step 1  no accuracy logged" in text_of(progress)


def test_a_validation_of_several_samples_shows_pass_at_k():
    progress = Progress(1, console(terminal=False))
    metrics = {
        "maj@4": 0.6,
        "mean@4": 0.5,
        "pass@1": 0.5,
        "pass@4": 0.75,
        "pass@4/gsm8k": 0.7,
        "reward/mean": 0.5,
    }
    progress.validation(1, metrics | {"samples": 64.0})
    assert (
        text_of(progress)
        == "validation  step 1  accuracy 0.5000  maj@4 0.6000  pass@4 0.7500  (64 samples)\n"
    )


def test_square_brackets_in_a_note_are_text_not_markup():
    progress = Progress(1, console(terminal=False))
    progress.note("[red]reward[/nonsense]")
    assert text_of(progress) == "[red]reward[/nonsense]\n"


def test_headline_shows_what_there_is():
    assert headline({}) == ""
    assert headline({"tokens_per_second": 5.0}) == "5 tokens/s"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, ""), (0.2, "0:00 left"), (75.0, "1:15 left"), (3723.0, "1:02:03 left")],
)
def test_time_left_is_readable(seconds, text):
    assert time_left(seconds) == text


def test_time_left_follows_the_recent_pace_and_runs_down_between_steps():
    pace = Pace(0, now=0.0)
    assert pace.seconds_left(10, now=0.0) is None
    pace.mark(1, now=100.0)
    pace.mark(2, now=200.0)
    assert pace.seconds_left(10, now=200.0) == 800.0
    assert pace.seconds_left(10, now=250.0) == 750.0
    for step in range(3, 43):
        pace.mark(step, now=200.0 + step)
    assert pace.seconds_left(52, now=242.0) == pytest.approx(10.0)


def test_time_left_of_a_resumed_run_ignores_earlier_steps():
    pace = Pace(50, now=0.0)
    pace.mark(51, now=2.0)
    assert pace.seconds_left(100, now=2.0) == 98.0


def test_a_step_done_again_starts_the_pace_anew():
    pace = Pace(0, now=0.0)
    pace.mark(1, now=1.0)
    pace.mark(1, now=50.0)
    assert pace.seconds_left(3, now=50.0) is None
    pace.mark(2, now=51.0)
    assert pace.seconds_left(3, now=51.0) == 1.0


def test_something_long_says_a_line_every_tenth_and_every_minute_in_a_ci_log():
    tenths = Tenths(now=0.0)
    due = [done for done in range(1, 401) if tenths.is_due(done, 400, now=0.01 * done)]
    assert due == list(range(40, 401, 40))
    slow = Tenths(now=0.0)
    assert [slow.is_due(1, 1000, now) for now in (59.0, 61.0, 100.0, 122.0)] == [
        False,
        True,
        False,
        True,
    ]


def test_a_pass_over_some_data_says_where_it_is_every_half_minute(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("siirl_dask.observe.progress.time.monotonic", lambda: now[0])
    progress = Progress(1, console(terminal=False))
    progress.begin_pass("evaluation")
    for beats in range(10):
        now[0] += 10
        progress.under_way(beats, "node 'rollout'")
    lines = text_of(progress).splitlines()
    assert lines == [
        f"evaluation {at} so far, in node 'rollout'" for at in ("0:30", "1:00", "1:30")
    ]


def test_a_pass_that_draws_samples_says_a_line_every_tenth_of_them(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("siirl_dask.observe.progress.time.monotonic", lambda: now[0])
    progress = Progress(1, console(terminal=False))
    progress.begin_pass("evaluation")
    for done in range(0, 2001, 50):
        now[0] += 1
        progress.under_way(done, "node 'rollout'", done, 2000)
    for _ in range(4):
        now[0] += 20
        progress.under_way(2001, "node 'reward'", 2000, 2000)
    lines = text_of(progress).splitlines()
    assert [line.partition(",  ")[0].split(" samples")[0] for line in lines] == [
        f"evaluation {done:,} of 2,000" for done in (*range(200, 2001, 200), 2000)
    ]
    assert lines[0] == "evaluation 200 of 2,000 samples, 0:05 so far, in node 'rollout'"
    assert lines[-1].endswith("in node 'reward'")


def test_a_warning_is_a_line_of_its_own_without_secrets():
    progress = Progress(1, console(terminal=False, width=20))
    progress.warn("it may need more than there is, s3://key:secret@host/run")
    assert text_of(progress).startswith("warning    it may need more than there is, s3://")
    assert "secret" not in text_of(progress)
