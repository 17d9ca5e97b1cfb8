"""Whole runs whose environments, tools or agents hang, raise, say too much or die, and Ctrl-C while
all of them wait.

Each is bounded and named, and nothing is left over: ``end`` fails for any process of the run, and
for what it had in /dev/shm. With ``-s`` each case prints a line of docs/benchmarks/faults.md.
"""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import psutil
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from siirl_dask.config.file import shipped
from siirl_dask.runs.reader import Run
from tests.e2e.test_openai_agent import HANGING
from tests.nodes import living

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
TURNS = shipped("quickstart_turns.yaml")
PROCESSES = ("environments.processes=4", "environments.max_open=4", "environments.timeout=1")
SMALL = ("rollout.max_response_length=24", "environments.turn_tokens=4", "environments.turns=4", "run.steps=2",
         "cluster.workers=2", "cluster.placement={}", "rollout.work_stealing=false")  # fmt: skip
MANY = (
    "data.batch_size=64",
    "rollout.n=8",
    "environments.max_open=600",
    "cluster.workers=2",
    "cluster.placement={}",
)
CALL = '<tool_call>{{"name": "act",{} "arguments": {{"what": "{}"}}}}</tool_call>'


def of(environment, *overrides):
    return (*SMALL, f"environments.environment=tests.environments.worlds:{environment}", *overrides)


def rows_of(run, step):
    return pq.read_table(run.url / "rollouts" / f"step={step:06d}").sort_by("row_id")


def line(what, where, configured, seconds, said):
    print(f"| {what} | {where} | {configured} | {seconds:.1f} | {said} |")


def sick(rows):
    return pa.array([sum(map(ord, prompt)) % 4 == 0 for prompt in rows["prompt"].to_pylist()])


def said_of(err):
    """The last error of a run, without what differs from run to run."""
    (error,) = [text for text in err.splitlines() if text.startswith("error: ")][:1]
    assert "Traceback" not in err
    return error


def sampled(cases, *kept):
    """Return all cases, of which those that are not kept run in the sweep alone."""
    return [pytest.param(case, marks=() if case in kept else pytest.mark.sweep) for case in cases]


FAULTS = {
    "hangs": ("Hangs", PROCESSES, "took more than 1 s"),
    "hangs, async": ("AsyncHangs", ("environments.timeout=1",), "took more than 1 s"),
    "raises": (
        "Raises",
        PROCESSES,
        "raised ValueError: no <tests.environments.worlds.Raises object at 0x...>",
    ),
    "raises, in the worker": (
        "Raises",
        (),
        "raised ValueError: no <tests.environments.worlds.Raises object at 0x...>",
    ),
    "dies": ("Dies", PROCESSES, "the process died (exit code -9)"),
}


@pytest.mark.parametrize("what", sampled(FAULTS, "hangs"))
def test_episodes_whose_environment_fails_have_no_reward_and_the_run_goes_on(start, what):
    environment, places, _ = FAULTS[what]
    run = start(*of(environment, *places, "environments.max_failures=1000"), config=TURNS)
    seconds, _, err = run.end(timeout=300)
    assert run.process.returncode == 0, err
    for step in (1, 2):
        rows = rows_of(run, step)
        failed = pc.equal(rows["finish_reason"], "failed")
        assert 0 < pc.sum(sick(rows)).as_py() < rows.num_rows
        assert pc.all(pc.or_(failed, pc.invert(sick(rows)))).as_py()
        if "processes" not in " ".join(places) or what == "raises":
            assert failed.combine_chunks().equals(sick(rows))
        assert rows["reward"].is_null().equals(failed)
    line(
        what,
        "environment",
        "may fail",
        seconds,
        f"{pc.sum(failed)} of {rows.num_rows} episodes `failed`",
    )


@pytest.mark.sweep
@pytest.mark.parametrize("what", FAULTS)
def test_a_failed_environment_ends_a_run_that_allows_none_by_the_name_of_the_episode(start, what):
    environment, places, reason = FAULTS[what]
    run = start(*of(environment, *places), config=TURNS)
    seconds, _, err = run.end(timeout=300)
    assert run.process.returncode == 2, err
    error = said_of(err)
    found = (
        r"episode \d+ of step 1, after \d turns, prompt 'Digits "
        r"\d+:'.*\(environments\.max_failures=0\)"
    )
    assert f"the environment {reason}" in error
    assert re.search(found, error)
    line(what, "environment", "may not fail", seconds, f"`{error[7:]}`")


@pytest.mark.sweep
def test_10_mb_of_an_environment_are_cut_and_end_the_episode_for_want_of_room(start):
    run = start(*of("Floods", *PROCESSES, "environments.max_observation=64"), config=TURNS)
    seconds, _, err = run.end(timeout=300)
    assert run.process.returncode == 0, err
    rows = rows_of(run, 1)
    assert pc.equal(rows["finish_reason"], "length").combine_chunks().equals(sick(rows))
    assert rows["reward"].null_count == 0
    line("says 10 MB", "environment", "64 bytes", seconds, "cut; those episodes end with `length`")


@pytest.fixture(scope="module")
def calling(tmp_path_factory):
    """``calling(what)``: a random model for which calls of ``act``, with ``what``, are single
    tokens, and chats.
    """
    from siirl_dask.tasks.tiny_model import CHAT_TEMPLATE, tiny_model

    def make(what):
        folder = tmp_path_factory.mktemp("calling")
        pieces = [CALL.format(" " * spaces, what) for spaces in range(6)]
        tiny_model(folder / "model", seed=0, chat_template=CHAT_TEMPLATE, pieces=pieces)
        prompts = [[{"role": "user", "content": f"Digits {number}:"}] for number in range(64)]
        pq.write_table(
            pa.table({"prompt": prompts, "answer": [""] * 64}),
            folder / "train.parquet",
            row_group_size=8,
        )
        return (
            f"model.path={folder / 'model'}",
            f"data.url={folder / 'train.parquet'}",
            "rollout.n=8",
        )

    return make


TOOL = (
    *("environments.environment=null", "environments.tools=['tests.environments.worlds:act']"),
    *("environments.processes=2", "environments.timeout=1", "environments.max_observation=128"),
    *("environments.turn_tokens=8", "environments.turns=3", "rollout.max_response_length=200"),
    *("data.max_prompt_length=64", "cluster.workers=2", "cluster.placement={}", "run.steps=1"),
)
TOOL_SAYS = {
    "hang": "error: act took more than 1 s",
    "raise": "error: act raised ValueError: no None",
    "10 MB": " [cut: 10000000 bytes]",
    "killed": "error: act the process died (exit code -9)",
}


@pytest.mark.parametrize("what", sampled(TOOL_SAYS, "killed"))
def test_what_becomes_of_a_tool_is_a_text_for_the_model(start, calling, what):
    run = start(*calling(what), *TOOL, config=TURNS)
    seconds, _, err = run.end(timeout=300)
    assert run.process.returncode == 0, err
    rows = rows_of(run, 1)
    heard = [TOOL_SAYS[what] in response for response in rows["response"].to_pylist()]
    assert any(heard)
    assert rows["reward"].null_count == 0
    assert pc.max(pc.list_value_length(rows["response_ids"])).as_py() <= 200
    line(what, "tool", "`text`", seconds, f"the model reads `{TOOL_SAYS[what].strip()}`")


@pytest.mark.sweep
def test_a_tools_failure_ends_the_run_where_it_is_the_episodes(start, calling):
    run = start(*calling("hang"), *TOOL, "environments.on_tool_error=failure", config=TURNS)
    seconds, _, err = run.end(timeout=300)
    assert run.process.returncode == 2, err
    error = said_of(err)
    assert "the environment its tool act took more than 1 s: episode" in error
    line("hangs", "tool", "`failure`", seconds, f"`{error[7:]}`")


@pytest.fixture
def noted(tmp_path, monkeypatch):
    """The numbers of environments' processes, each with that of a process which it has started."""
    folder = tmp_path / "noted"
    folder.mkdir()
    monkeypatch.setenv("NOTED", str(folder))
    return lambda: [tuple(map(int, path.name.split("-"))) for path in folder.iterdir()]


def test_an_environments_process_that_is_killed_costs_the_episodes_that_it_held(start, noted):
    run = start(
        *of("Lasts", "environments.processes=2", "environments.max_failures=1000"), config=TURNS
    )
    run.wait_until(lambda: len(noted()) >= 4)
    own, child = noted()[0]
    os.kill(own, signal.SIGKILL)
    seconds, _, err = run.end(timeout=300)
    assert run.process.returncode == 0, err
    failed = [
        pc.sum(pc.equal(rows_of(run, step)["finish_reason"], "failed")).as_py() for step in (1, 2)
    ]
    assert 0 < failed[0] < 32
    assert failed[1] == 0
    assert not psutil.pid_exists(child)
    line(
        "process killed",
        "environment",
        "may fail",
        seconds,
        f"{failed[0]} of 32 episodes of the step `failed`",
    )


@pytest.mark.sweep
def test_a_worker_that_is_killed_takes_its_environments_with_it_and_the_run_goes_on(start, noted):
    """So does what an environment has started."""
    run = start(*of("Lasts", "environments.processes=2"), config=TURNS)
    run.wait_until(lambda: len(noted()) >= 4)
    worker = run.workers()[1]
    below = {process.pid for process in worker.children(recursive=True)}
    (own, child), *_ = [pair for pair in noted() if pair[0] in below]
    killed = time.monotonic()
    os.kill(worker.pid, signal.SIGKILL)
    gone = until_gone((own, child)) - killed
    seconds, _, err = run.end(timeout=300)
    assert run.process.returncode == 0, err
    assert Run(str(run.url)).steps == [1, 2]
    line(
        "worker killed",
        "environment",
        "restarts",
        seconds,
        f"its environments are gone after {gone:.1f} s; all steps",
    )


def until_gone(pids):
    deadline = time.monotonic() + 10
    while any(
        psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
        for pid in pids
    ):
        assert time.monotonic() < deadline, [
            psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)
        ]
        time.sleep(0.05)
    return time.monotonic()


@pytest.mark.sweep
def test_an_environment_that_hangs_in_the_worker_ends_the_run_when_it_stalls(start):
    run = start(*of("Hangs", "cluster.stall_timeout=5", "run.max_restarts=0"), config=TURNS)
    seconds, _, err = run.end(timeout=300)
    assert run.process.returncode == 1
    error = said_of(err)
    assert re.search(
        r"nothing got done (within|for) \d+ s \((cluster\.stall_timeout|run\.node_timeout)\)", error
    )
    assert "node 'rollout'" in err
    line(
        "hangs, in the worker",
        "environment",
        "`cluster.stall_timeout=5`",
        seconds,
        f"`{error[7:150]}`",
    )


@pytest.mark.parametrize(
    "places",
    sampled(
        [("environments.processes=2",), ("environments.processes=2", "run.grace=5")],
        ("environments.processes=2",),
    ),
)
def test_ctrl_c_ends_a_run_whose_512_environments_wait_in_processes(start, noted, places):
    """One call is under way in each process; the others wait for theirs."""
    run = start(*of("NeverEnds", *MANY, *places), config=TURNS)
    run.wait_until(lambda: len(noted()) >= 4)
    os.killpg(run.process.pid, signal.SIGINT)
    seconds, _, err = run.end(timeout=60)
    assert run.process.returncode == 130
    assert "stopped by the user after 0 of" in said_of(err)
    assert not [pid for pair in noted() for pid in pair if psutil.pid_exists(pid)]
    assert seconds < 20 * run.slowdown
    line("Ctrl-C, 512 wait", "environment", "processes", seconds, f"`{said_of(err)[7:]}`")


LIVING = "agent: {living}:notes_and_hangs"


@pytest.mark.parametrize(
    "agent", sampled([LIVING, "command: [sh, -c, 'touch $NOTED; sleep 1000']"], LIVING)
)
def test_ctrl_c_ends_a_run_whose_512_agents_wait(start, tmp_path, monkeypatch, agent):
    """As many coroutines as are open at once, or programs, of which 32 run on each worker."""
    config = tmp_path / "hangs.yaml"
    text = HANGING.replace("agent: {living}:notes_and_hangs", agent)
    config.write_text(text.format(base=shipped("quickstart.yaml"), living=living.__file__))
    monkeypatch.setenv("NOTED", str(tmp_path / "noted"))
    settings = [
        "data.batch_size=64",
        "rollout.n=8",
        "cluster.workers=2",
        "cluster.placement={}",
        "endpoint.timeout=500",
    ]
    run = start(*settings, config=config)
    run.wait_until(Path(tmp_path / "noted").exists)
    run.process.send_signal(signal.SIGINT)
    seconds, _, err = run.end(timeout=60)
    assert run.process.returncode == 130
    assert seconds < 20 * run.slowdown, err
    line("Ctrl-C, 512 wait", "agent", agent.split(":")[0], seconds, f"`{said_of(err)[7:]}`")
