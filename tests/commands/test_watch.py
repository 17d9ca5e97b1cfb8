"""``siirl-dask watch``: what a run does is seen from its URL alone, and how it ended is the exit
code.
"""

import io
import threading
from argparse import Namespace

import pytest
from rich.console import Console
from siirl_storage import join
from siirl_storage.counting import count_reads

from siirl_dask.cli import main
from siirl_dask.commands.watch import watch
from siirl_dask.observe import MetricsLog, Restart, Status
from siirl_dask.runs.folder import remove_summary
from siirl_dask.views.watch.look import Life, Watcher
from siirl_dask.views.watch.screen import screen
from tests.written_runs import (
    begin_run,
    end_run,
    save_rows,
    start_run,
    train_record,
    validation_record,
    whole_run,
    write_metrics,
    write_trace,
)


def watched(capsys, *arguments):
    with pytest.raises(SystemExit) as ended:
        main(["watch", *map(str, arguments)])
    return ended.value.code, capsys.readouterr()


def shown(look, width=110):
    console = Console(record=True, file=io.StringIO(), width=width, _environ={})
    console.print(screen(look, width))
    return console.export_text()


def test_a_run_that_has_ended_is_shown_from_any_store(store_url, capsys):
    code, said = watched(capsys, whole_run(join(store_url, "run"), traced=1))
    assert code == 0
    for told in (
        "quickstart  complete  step 10 of 60  in 1 min 31 s on 4 workers",
        "training reward",
        "validation reward",
        "slowest  node 'rollout' on worker '1'",
        "some samples of step 10",
        "reward 0.5   Sort: 2 1 =  1 2",
    ):
        assert told in said.out, told
    assert max(map(len, said.out.splitlines())) <= 80 + len(store_url)


@pytest.mark.parametrize(
    ("status", "code"), [(Status.COMPLETE, 0), (Status.FAILED, 1), (Status.INTERRUPTED, 130)]
)
@pytest.mark.parametrize("options", [[], ["--once"]])
def test_the_exit_code_is_how_the_run_ended(tmp_path, capsys, status, code, options):
    url = begin_run(tmp_path / "run")
    start_run(url)
    end_run(url, status=status, error=None if code == 0 else "it raised \x1b[2J")
    ended, said = watched(capsys, url, *options)
    assert ended == code
    assert status in said.out
    assert ("it raised" in said.out) == bool(code)
    assert "\x1b[2J" not in said.out


def test_a_run_whose_process_has_gone_without_a_word_is_said_to_be_gone(tmp_path, capsys):
    begin_run(tmp_path / "run")
    start_run(tmp_path / "run", beat=b"ended\n")
    code, said = watched(capsys, tmp_path / "run")
    assert code == 1
    assert "gone: it was killed" in said.out


def test_a_run_lives_while_its_sign_of_life_changes_and_is_gone_after_its_lease(tmp_path):
    url = begin_run(tmp_path / "run")
    start_run(url, beat=b"1\n", lease=30)
    watcher = Watcher(url)
    assert watcher.look(0.0).life is Life.UNKNOWN
    assert watcher.look(5.0).life is Life.UNKNOWN
    start_run(url, beat=b"2\n")
    assert watcher.look(6.0).life is Life.UNDER_WAY
    assert watcher.look(35.9).life is Life.UNDER_WAY
    look = watcher.look(36.1)
    assert look.life is Life.GONE
    assert "the command that started it resumes it" in shown(look)
    start_run(url, 2, beat=b"1\n")
    assert watcher.look(37.0).life is Life.UNDER_WAY, "another start has taken it over"


def test_a_summary_of_an_earlier_start_does_not_end_the_watch(tmp_path):
    url = whole_run(tmp_path / "run")
    assert Watcher(url).look(0.0).life is Life.ENDED
    start_run(url, 2, beat=b"1\n")
    watcher = Watcher(url)
    assert watcher.look(0.0).life is Life.UNKNOWN
    start_run(url, 2, beat=b"2\n")
    remove_summary(url)
    assert watcher.look(1.0).life is Life.UNDER_WAY
    end_run(url, status=Status.FAILED, error="later")
    assert watcher.look(2.0).life is Life.UNDER_WAY, "it has not let go of the folder yet"
    start_run(url, 2, beat=b"ended\n")
    look = watcher.look(3.0)
    assert (look.life, look.summary.error) == (Life.ENDED, "later")


def test_the_time_left_is_that_of_the_steps_as_they_are_seen_to_come(tmp_path):
    url = begin_run(tmp_path / "run", "run.steps=10")
    write_metrics(url, [train_record(step, seconds=3.0) for step in (1, 2, 3, 4)])
    watcher = Watcher(url)
    assert watcher.look(100.0).seconds_left == pytest.approx(18.0), "as the steps themselves say"
    MetricsLog(url).write(train_record(5))
    MetricsLog(url).write(train_record(6))
    assert watcher.look(102.0).seconds_left == pytest.approx(4.0), "two steps came in two seconds"
    assert watcher.look(103.0).seconds_left == pytest.approx(3.0)


def test_what_is_shown_of_a_run_under_way_is_of_its_newest_whole_step(tmp_path):
    url = begin_run(tmp_path / "run")
    write_metrics(url, [validation_record(0, 0.25), *(train_record(step) for step in (1, 2))])
    write_trace(url, 1, slow=3.0)
    save_rows(url, "rollouts", 1, [("Sort: [bold]2[/x] 1 =", "1 2", "\x1b[2J1 2", 1.0)])
    watcher = Watcher(url)
    look = watcher.look(0.0)
    assert (look.slowest.worker, look.traced_steps, look.samples_step) == ("1", [1], 1)
    text = shown(look)
    assert "Sort: [bold]2[/x] 1 =" in text
    assert "\x1b[2J" not in text
    save_rows(url, "rollouts", 2, [("Sort: 3 =", "3", "3", 0.5)])
    assert watcher.look(5.0).samples_step == 1, "tables are looked at every ten seconds"
    assert watcher.look(11.0).samples_step == 2


def test_damage_is_told_and_the_last_look_stays(tmp_path):
    url = begin_run(tmp_path / "run")
    write_metrics(url, [train_record(1)])
    write_trace(url, 1)
    (part, *_) = (tmp_path / "run" / "trace" / "step=000001").iterdir()
    part.write_bytes(part.read_bytes()[:-9])
    look = Watcher(url).look(0.0)
    assert part.name in look.trouble
    assert look.records
    assert "training reward" in shown(look)


def test_of_large_tables_little_is_read(tmp_path):
    url = begin_run(tmp_path / "run")
    write_metrics(url, [train_record(1)])
    rows = [(f"{at} " + "long prompt " * 40, "1", f"{at} " * 400, 1.0) for at in range(4000)]
    save_rows(url, "rollouts", 1, rows)
    reads = count_reads()
    look = Watcher(f"counting://{url}").look(0.0)
    assert len(look.samples) == 3
    assert reads.bytes_of(f"{url}/rollouts") < 2**24


def test_without_a_terminal_lines_come_as_the_run_goes_on(tmp_path, capsys):
    url = begin_run(tmp_path / "run", "run.steps=3")
    start_run(url, beat=b"1\n")
    write_metrics(url, [train_record(1)])
    codes = []
    asked = Namespace(run=url, every=0.1, once=False)
    watching = threading.Thread(target=lambda: codes.append(watch(asked)))
    watching.start()
    seen, log = "", MetricsLog(url)
    for number, record in enumerate(
        (None, train_record(2), validation_record(2, 0.75), train_record(3))
    ):
        if record:
            log.write(record)
        start_run(url, beat=b"%d\n" % (number + 2))
        words = ("run  ", "step 2/3", "validation  step 2  accuracy 0.7500", "step 3/3")[number]
        while words not in seen:
            assert watching.is_alive(), seen
            watching.join(0.02)
            seen += capsys.readouterr().out
    end_run(url, steps=3, restarts=[Restart(cause="lost", steps=2)])
    start_run(url, beat=b"ended\n")
    watching.join(30)
    seen += capsys.readouterr().out
    assert codes == [0]
    assert "quickstart  complete  step 3 of 3" in seen
    assert "went on by itself 1 time, last after step 2" in seen


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["{run}/none"], "run/none' holds no run"),
        (["s4://bucket/run"], "Protocol not known: s4"),
        (["{run}", "--every", "soon"], "'soon': expected seconds from 0.1 to 3600"),
        (["{run}", "--every", "0"], "'0': expected seconds from 0.1 to 3600"),
        (["{run}", "--onec"], "did you mean '--once'"),
    ],
)
def test_what_cannot_be_watched_is_refused(tmp_path, capsys, arguments, said):
    begin_run(tmp_path / "run")
    code, told = watched(capsys, *(text.format(run=tmp_path / "run") for text in arguments))
    assert code == 2
    assert said in told.err
