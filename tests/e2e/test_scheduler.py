"""Dask's scheduler is no part of a step: workers have their next tasks before they need them, in
order.
"""

import threading

from distributed import Client

from tests.clusters import local_cluster
from tests.e2e import fake_device


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
        run.wait_until(
            lambda: sum(ts.state == "processing" for ts in list(scheduler.tasks.values())) == 2 * 4
        )
        # nothing else happens on the scheduler's loop until then
        cluster.loop.add_callback(awake.wait)
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
        assert (
            four.table("rollouts", step)
            .select(decided)
            .equals(one.table("rollouts", step).select(decided))
        ), step


def test_every_thread_that_a_run_comes_to_has_the_workers_own_device_as_its_current_one(train):
    """torch keeps one for each thread, and a task runs in any of a worker's four; closing comes
    from a fifth.
    """
    settings = (
        "cluster.workers=2",
        "cluster.placement={}",
        "run.lookahead=3",
        "run.steps=4",
        "checkpoint.every=2",
    )
    with local_cluster(2, threads_per_worker=4) as cluster, Client(cluster) as client:
        client.run(fake_device.install)
        train(
            "devices",
            *settings,
            "rollout.engine=transformers",
            f"cluster.address={cluster.scheduler_address}",
        )
        for calls in client.run(fake_device.seen).values():
            expected = {"empty_cache"}  # memory is given back at the end
            for kind, methods in fake_device.CALLS.items():
                expected |= {f"{kind.__name__}.{method}" for method in methods}
            assert {name for name, _, _ in calls} == expected
            assert {device for _, device, _ in calls} == {0}
            assert len({thread for _, _, thread in calls}) > 1
