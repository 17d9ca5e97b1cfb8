"""While a run is prepared, the end of the scheduler is told as what it is, whatever fails because
of it; and so is that of a worker.
"""

import os
import signal
from contextlib import contextmanager, suppress
from functools import partial

import pytest
from distributed import Client
from siirl_storage.digests import FileDigest

from siirl_dask.config import ClusterConfig
from siirl_dask.driver.clusters.processes import members, workers_needed
from siirl_dask.driver.recovery.scheduler_guard import scheduler_guard
from siirl_dask.driver.recovery.verification import WrittenFile, damages_of
from siirl_dask.errors import ConfigError, SchedulerLost, WorkerLost
from tests.clusters import lasting_port
from tests.e2e.traps import start_scheduler

GONE = "tcp://127.0.0.1:1"


@contextmanager
def started():
    """A scheduler process without workers, and a client of it."""
    port = lasting_port()
    scheduler = start_scheduler(port)
    client = Client(f"tcp://127.0.0.1:{port}", timeout=30)
    yield scheduler, client
    with suppress(TimeoutError):  # of one that stands still
        client.close(timeout=0.5)
    scheduler.kill()
    scheduler.join()


@pytest.fixture
def lone():
    """A scheduler that a test may kill, and a client of it."""
    with started() as scheduler_and_client:
        yield scheduler_and_client


@pytest.fixture(scope="module")
def client():
    """A client of a scheduler that stays."""
    with started() as (_, client):
        yield client


def guarded(client, cluster, *steps):
    with scheduler_guard(client, cluster):
        for step in steps:
            step()


def refuse(client):
    raise ConfigError("the scheduler cannot load siirl_dask: it did not answer")


@pytest.mark.parametrize(
    "call",
    [
        lambda client: client.run_on_scheduler(os.getpid),
        lambda client: client.submit(os.getpid).result(),  # there is no worker: it waits
        refuse,
    ],
    ids=["call", "wait", "refusal"],
)
def test_the_end_of_the_scheduler_is_told_whatever_it_makes_fail(lone, call):
    scheduler, client = lone
    cluster = ClusterConfig(address=client.scheduler.address)
    told = (
        rf"while the run was prepared: the scheduler at {cluster.address} has ended: its port "
        r"refuses connections"
    )
    with pytest.raises(SchedulerLost, match=told) as raised:
        guarded(client, cluster, scheduler.kill, scheduler.join, lambda: call(client))
    assert raised.value.may_return


@pytest.mark.slow
def test_a_scheduler_that_stands_still_keeps_nobody_waiting(lone):
    scheduler, client = lone
    cluster = ClusterConfig(scheduler_timeout=0, address=client.scheduler.address)
    stop = partial(os.kill, scheduler.pid, signal.SIGSTOP)
    with pytest.raises(
        SchedulerLost, match=r"no sign of life of the scheduler at \S+ within 8 s"
    ) as raised:
        guarded(client, cluster, stop, lambda: client.run_on_scheduler(os.getpid))
    assert not raised.value.may_return


def test_an_error_beside_a_scheduler_that_answers_is_the_error(client):
    with (
        pytest.raises(ConfigError, match="it did not answer"),
        scheduler_guard(client, ClusterConfig()),
    ):
        refuse(client)
    with pytest.raises(SchedulerLost, match="x"), scheduler_guard(client, ClusterConfig()):
        raise SchedulerLost("x")
    with scheduler_guard(client, ClusterConfig()):
        assert client.run_on_scheduler(os.getpid)


def test_a_worker_that_has_left_is_named_whatever_fails_because_of_that(client):
    with (
        pytest.raises(
            WorkerLost, match=f"worker 'a' at {GONE} left the cluster while the run was prepared"
        ),
        workers_needed(client, {"a": GONE}),
    ):
        refuse(client)
    with pytest.raises(ConfigError, match="it did not answer"), workers_needed(client, {}):
        refuse(client)


def test_files_that_a_worker_was_to_read_which_has_left_are_not_waited_for(client, tmp_path):
    files = [WrittenFile(str(tmp_path), "weights", FileDigest(1, "0" * 64))]
    with pytest.raises(
        WorkerLost,
        match=f"worker 'a' at {GONE} left the cluster while files of the run were verified",
    ):
        damages_of(client, {"a": GONE}, files, timeout=600)


def test_a_run_never_begins_with_fewer_workers_than_it_was_told(client):
    with pytest.raises(WorkerLost, match="0 of 2 workers are there"):
        members(client, 2)
