"""The node that scores responses: rewards, failed rows, and child processes that end with the
scorer.
"""

import importlib
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import psutil
import pyarrow as pa
import pytest

from siirl_dask.config import RewardsConfig
from siirl_dask.context import Context, Device, Rank
from siirl_dask.errors import ConfigError, RewardError
from siirl_dask.nodes import score
from siirl_dask.rewards import build_scorer, from_verl
from siirl_dask.schema import TYPES
from siirl_dask.testing.local_pool import ThreadPeers
from tests.nodes.rewards import (
    capricious,
    counts_turns,
    fails_and_counts,
    fails_and_counts_async,
    length,
    length_of_prompt_text,
    parts,
    says_42,
    slow_and_async,
    tells_its_process,
    with_extra,
)

IN_PROCESS, POOL = {}, {"processes": 2}


def table(responses, prompts=None, **columns):
    count = len(responses)
    identity = {
        name: pa.array(range(count), pa.int64()) for name in ("row_id", "group_id", "tokens")
    }
    text = {"prompt": prompts or ["p"] * count, "response": responses, "answer": ["a"] * count}
    return pa.table(
        {**identity, **{name: pa.array(v, pa.string()) for name, v in text.items()}, **columns}
    )


@pytest.fixture
def scored():
    """Return a function: ``scored(function, table, **rewards)`` gives the node's output and its
    metrics.
    """
    scorers = []

    def run(function, rows, columns=(), peers=None, **rewards):
        scorers.append(
            build_scorer(Device("w"), Rank(), rewards=RewardsConfig(**rewards), reward=function)
        )
        ctx = Context(step=1, run_seed=0, rank=Rank(), device=Device("w"), resource=scorers[-1])
        ctx.peers = peers or ctx.peers
        return score(ctx, rows, columns=columns), ctx.metrics

    yield run
    for scorer in scorers:
        scorer.close()


@pytest.mark.parametrize("where", [IN_PROCESS, POOL], ids=["worker", "pool"])
def test_rows_keep_their_order(scored, where):
    responses = ["x" * (i % 7) for i in range(40)]
    output, _ = scored(length, table(responses), **where)
    assert output["reward"].to_pylist() == [len(response) for response in responses]


@pytest.mark.parametrize("where", [IN_PROCESS, POOL], ids=["worker", "pool"])
def test_a_dict_becomes_a_column_and_metrics(scored, where):
    output, metrics = scored(parts, table(["x", "", "y"]), **where)
    assert output["reward"].to_pylist() == [0.5, 0.25, 0.5]
    assert [dict(row) for row in output["reward_parts"].to_pylist()] == [
        {"reward": 0.5, "format": 1.0},
        {"reward": 0.25, "empty": 1.0},
        {"reward": 0.5, "format": 1.0},
    ]
    assert metrics["reward/format"].value == 1.0
    assert metrics["reward/empty"].weight == 1


@pytest.mark.parametrize("where", [IN_PROCESS, POOL], ids=["worker", "pool"])
def test_a_function_that_names_the_prompts_text_gets_it_where_there_is_one(scored, where):
    seen = table(["x", "y"], prompt_text=pa.array(["<think>", "<|assistant|><think>"]))
    output, _ = scored(length_of_prompt_text, seen, **where)
    assert output["reward"].to_pylist() == [7, 20]
    output, _ = scored(length_of_prompt_text, table(["x", "y"]), **where)
    assert output["reward"].to_pylist() == [4, 4]
    output, _ = scored(length, seen, **where)
    assert output["reward"].to_pylist() == [1, 1]


@pytest.mark.parametrize("where", [IN_PROCESS, POOL], ids=["worker", "pool"])
def test_a_function_of_another_package_gets_the_response_without_special_tokens(scored, where):
    plain = pa.array(["42", None], pa.string())
    seen = table(["42<|im_end|>", "42 "], plain_response=plain)
    output, _ = scored(partial(from_verl, function=says_42), seen, **where)
    assert output["reward"].to_pylist() == [1, 0]
    output, _ = scored(length, seen, **where)
    assert output["reward"].to_pylist() == [12, 3]


def test_a_function_of_verls_gets_the_number_of_turns_of_an_episode(scored):
    turns = [[{"start": 0, "stop": 1, "reward": 0.0, "state": 0}] * count for count in (1, 3)]
    seen = table(["x", "y"], turns=pa.array(turns, TYPES["turns"]))
    output, _ = scored(partial(from_verl, function=counts_turns), seen)
    assert output["reward"].to_pylist() == [2, 6]


def test_the_function_gets_extra_columns_by_name(scored):
    output, _ = scored(with_extra, table(["x", "y"], level=pa.array([3, 4])), columns=("level",))
    assert output["reward"].to_pylist() == [3, 4]


def test_no_rows_give_typed_columns(scored):
    output, _ = scored(length, table([]))
    assert (output["reward"].type, output["reward_parts"].type) == (
        pa.float32(),
        pa.map_(pa.string(), pa.float32()),
    )


@pytest.mark.parametrize("where", [IN_PROCESS, POOL], ids=["worker", "pool"])
@pytest.mark.parametrize(
    ("response", "said"),
    [
        ("raise", "raised RuntimeError: no"),
        ("nan", "gave nan: expected a finite number"),
        ("text", "gave '1.0': expected a finite number"),
        ("nameless", r"gave \{'format': 1.0\}: expected a finite number for \['reward'\]"),
    ],
)
def test_a_failure_stops_the_step_and_names_its_row(scored, where, response, said):
    with pytest.raises(
        RewardError,
        match=rf"reward capricious {said}.*: row 1 of step 1, prompt 'p', response '{response}', answ",
    ):
        scored(capricious, table(["fine", response]), **where)


def test_allowed_failures_have_no_reward_and_do_not_count_in_the_mean(scored):
    responses = ["fine", "raise", "fine", "die", "hang"]
    output, metrics = scored(capricious, table(responses), processes=1, timeout=2.0, max_failures=3)
    assert output["reward"].to_pylist() == [1.0, None, 1.0, None, None]
    assert metrics["reward/failures"].value == 3
    assert (metrics["reward/mean"].value, metrics["reward/mean"].weight) == (1.0, 2)


@pytest.mark.parametrize(
    ("function", "options", "calls"),
    [
        (fails_and_counts, {}, 3),
        (fails_and_counts, {"processes": 1}, 3),
        (fails_and_counts, {"processes": 2}, 4),  # one more is under way
        (fails_and_counts_async, {"concurrency": 1}, 3),
        (fails_and_counts_async, {"concurrency": 2}, 4),
    ],
    ids=["worker", "pool of 1", "pool of 2", "async", "async two at once"],
)
def test_no_row_is_scored_after_more_have_failed_than_may(
    scored, tmp_path, function, options, calls
):
    rows = table([str(tmp_path / str(i)) for i in range(40)], prompts=["raise"] * 40)
    said = (
        r"raised RuntimeError: no \(tests/nodes/rewards.py:\d+\): row 0 of step 1, .*failed for at least 3 rows "
        r".*rewards\.max_failures=2"
    )
    with pytest.raises(RewardError, match=said):
        scored(function, rows, max_failures=2, **options)
    assert 3 <= len(list(tmp_path.iterdir())) <= calls


@pytest.mark.parametrize(
    ("function", "processes"), [(fails_and_counts, 2), (fails_and_counts_async, 0)]
)
def test_rows_under_way_are_not_waited_for_after_too_many_failures(
    scored, tmp_path, function, processes
):
    """All rows hang for ten minutes but one of the first three, which raises."""
    prompts = ["hang", "raise"] if processes else ["hang", "hang", "raise"]
    rows = table(
        [str(tmp_path / str(i)) for i in range(40)],
        prompts=prompts + ["hang"] * (40 - len(prompts)),
    )
    began = time.monotonic()
    with pytest.raises(RewardError, match="raised RuntimeError: no"):
        scored(function, rows, processes=processes)
    assert time.monotonic() - began < 300


def test_a_hanging_reward_costs_one_timeout_and_not_one_a_row(scored, tmp_path):
    rows = table([str(tmp_path / str(i)) for i in range(40)], prompts=["hang"] * 40)
    with pytest.raises(RewardError, match=r"took more than 0\.5 s: row [01] "):
        scored(fails_and_counts, rows, processes=2, timeout=0.5)
    assert len(list(tmp_path.iterdir())) <= 2


def test_a_scorer_scores_again_after_too_many_failures(tmp_path):
    scorer = build_scorer(
        Device("w"), Rank(), rewards=RewardsConfig(processes=2), reward=fails_and_counts
    )
    rows = [
        {"prompt": prompt, "response": str(tmp_path / "row"), "answer": ""}
        for prompt in ("hang", "raise", "")
    ]
    assert [result.reward for result in scorer.score(rows)] == [None, None, None]
    assert [result.reward for result in scorer.score(rows[2:])] == [1.0]
    scorer.close()


@pytest.mark.parametrize(
    ("response", "said"), [("hang", "took more than 2 s"), ("die", r"exit code 3")]
)
def test_a_row_that_hangs_or_kills_its_process_is_named(scored, response, said):
    with pytest.raises(RewardError, match=f"{said}.*row 1"):
        scored(capricious, table(["fine", response, "fine"]), processes=1, timeout=2.0)


def test_failures_are_counted_over_all_workers(scored):
    """The workers have 0, 2 and 1 failures of 2 allowed: all of them stop, the one without a
    failure too.
    """
    peers = ThreadPeers(3)
    rows = [["fine"], ["raise", "raise"], ["raise"]]
    with ThreadPoolExecutor(3) as threads:
        running = [
            threads.submit(scored, capricious, table(r), peers=peers.at(rank), max_failures=2)
            for rank, r in enumerate(rows)
        ]
        errors = [future.exception() for future in running]
    assert [type(error) for error in errors] == [RewardError] * 3
    assert "failed for 3 rows of step 1 elsewhere" in str(errors[0])


def test_a_worker_with_too_many_failures_does_not_keep_its_peers_waiting(scored):
    peers = ThreadPeers(2)
    rows = [["fine"], ["raise"] * 5]
    with ThreadPoolExecutor(2) as threads:
        running = [
            threads.submit(scored, capricious, table(r), peers=peers.at(rank), max_failures=1)
            for rank, r in enumerate(rows)
        ]
        errors = [future.exception() for future in running]
    assert [type(error) for error in errors] == [RewardError] * 2
    assert "failed for 2 rows of step 1 elsewhere" in str(errors[0])


def test_where_no_row_may_fail_nobody_waits_for_the_count_of_others(scored):
    never = ThreadPeers(2)  # the other worker does not come
    output, _ = scored(capricious, table(["fine"]), peers=never.at(0))
    assert output["reward"].null_count == 0
    with pytest.raises(
        RewardError,
        match=r"raised RuntimeError: no \(tests/nodes/rewards.py:\d+\): row 0 of step 1.*"
        r"\(rewards\.max_failures=0\)",
    ):
        scored(capricious, table(["raise"]), peers=never.at(1))


@pytest.mark.alone
def test_an_async_function_runs_concurrently_and_needs_no_pool_for_a_timeout(scored):
    began = time.monotonic()
    output, _ = scored(
        slow_and_async, table(["quick", *["slow"] * 20]), timeout=0.3, max_failures=20
    )
    assert output["reward"].to_pylist() == [1.0, *[None] * 20]
    assert time.monotonic() - began < 5  # one after the other they would take 6


def test_a_timeout_without_a_pool_is_refused_for_a_sync_function():
    with pytest.raises(ConfigError, match=r"rewards\.timeout=1 needs rewards\.processes"):
        build_scorer(Device("w"), Rank(), rewards=RewardsConfig(timeout=1.0), reward=length)


def test_a_function_that_cannot_be_pickled_is_refused_when_the_role_is_built():
    lock = threading.Lock()
    with pytest.raises(ConfigError, match="cannot be sent to other processes"):
        build_scorer(
            Device("w"),
            Rank(),
            rewards=RewardsConfig(processes=1),
            reward=lambda **row: lock.locked(),
        )


def test_a_function_that_a_child_cannot_load_is_refused_when_the_role_is_built(
    tmp_path, monkeypatch
):
    (tmp_path / "here_only.py").write_text("def reward(**row):\n    return 1.0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    reward = importlib.import_module("here_only").reward
    (tmp_path / "here_only.py").write_text("raise RuntimeError('no such thing here')\n")
    with pytest.raises(
        ConfigError, match=r"cannot be loaded in a process of its own.*no such thing here"
    ):
        build_scorer(Device("w"), Rank(), rewards=RewardsConfig(processes=1), reward=reward)


def test_close_leaves_no_process(scored, tmp_path):
    files = [str(tmp_path / str(i)) for i in range(4)]
    scorer = build_scorer(
        Device("w"), Rank(), rewards=RewardsConfig(processes=2), reward=tells_its_process
    )
    scorer.score([{"prompt": "p", "response": file, "answer": ""} for file in files])
    scorer.close()
    assert not any(psutil.pid_exists(int(Path(file).read_text())) for file in files)


def test_child_processes_die_with_a_killed_worker_even_one_that_hangs(tmp_path):
    from distributed import Client

    from tests.clusters import local_cluster

    def start(file):
        scorer = build_scorer(
            Device("w"), Rank(), rewards=RewardsConfig(processes=1), reward=tells_its_process
        )
        scorer.score([{"prompt": "hang", "response": file, "answer": ""}])

    with local_cluster(1) as cluster, Client(cluster) as client:
        told = tmp_path / "pid"
        client.submit(start, str(told), pure=False)
        worker = psutil.Process(next(iter(client.run(os.getpid).values())))
        deadline = time.monotonic() + 60
        while not told.exists() or not told.read_text():
            assert time.monotonic() < deadline
            worker.is_running()
        child = psutil.Process(int(told.read_text()))
        worker.kill()
        assert not psutil.wait_procs([child], timeout=60)[1]
