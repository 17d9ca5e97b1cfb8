"""Dask's scheduler is no part of a step: workers have their next tasks before they need them, in order."""

import threading

from tests.clusters import local_cluster


def test_workers_run_the_steps_they_were_given_while_the_scheduler_does_nothing(start, tmp_path):
    go, awake = tmp_path / "go", threading.Event()
    with local_cluster(2, env={"WAITED_FOR": str(go)}) as cluster:
        scheduler = cluster.scheduler
        run = start(
            "rewards.function=tests.e2e.rewards:waits_for_a_file",
            f"cluster.address={cluster.scheduler_address}",
            "cluster.workers=2",
            "cluster.placement={}",
            "cluster.peer_timeout=60",
            "run.lookahead=3",
            "run.steps=4",
        )
        run.wait_until(lambda: sum(ts.state == "processing" for ts in list(scheduler.tasks.values())) == 2 * 4)
        cluster.loop.add_callback(awake.wait)  # nothing else happens on the scheduler's loop until then
        try:
            go.touch()
            last = run.url / "rollouts" / "step=000004"
            run.wait_until(lambda: last.exists() and len(list(last.glob("part-*"))) == 2)
            assert not run.steps()  # the driver has heard of none of it
        finally:
            awake.set()
        _, _, err = run.end(timeout=60)
    assert run.process.returncode == 0, err
    assert run.steps() == 4


def test_workers_of_many_threads_run_one_step_after_the_other(train):
    """Each has four tasks at once, and threads for all of them."""
    settings = ("cluster.workers=2", "cluster.placement={}", "run.lookahead=3", "run.steps=6")
    one = train("one thread", *settings)
    with local_cluster(2, threads_per_worker=4) as cluster:
        four = train("four threads", *settings, f"cluster.address={cluster.scheduler_address}")
    decided = ["row_id", "response_ids", "reward", "weights_version"]
    for step in range(1, 7):
        assert four.table("rollouts", step).select(decided).equals(one.table("rollouts", step).select(decided)), step
