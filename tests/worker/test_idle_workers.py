"""The scheduler tells an elastic run of idle workers, of those that leave, and of those that
another run has taken.
"""

import time
from contextlib import contextmanager

import pytest
from distributed import Client, Event, LocalCluster
from distributed import get_worker as this_worker

from siirl_dask.errors import PeerError
from siirl_dask.scheduler.idle_workers import free_workers, used_workers
from siirl_dask.scheduler.supervisor import Supervisor


@pytest.fixture
def client():
    """A client of three workers in this process."""
    quiet = {"dashboard_address": "127.0.0.1:0", "silence_logs": 50}
    with (
        LocalCluster(n_workers=3, threads_per_worker=1, processes=False, **quiet) as cluster,
        Client(cluster) as client,
    ):
        yield client


def workers(client):
    return {
        str(info["name"]): at for at, info in client.scheduler_info(n_workers=-1)["workers"].items()
    }


@contextmanager
def run(client, name, *members, **options):
    """Register a supervisor, and yield the events that it tells."""
    told, known = [], workers(client)
    client.subscribe_topic(name, lambda event: told.append(event[1]))
    until(lambda: client.log_event(name, "subscribed") or told)
    client.register_plugin(
        Supervisor(name, name, {member: known[member] for member in members}, None, **options)
    )
    yield lambda: [event for event in told if event != "subscribed"]
    client.unsubscribe_topic(name)


def until(reached):
    deadline = time.monotonic() + 30
    while not reached():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_workers_of_other_runs_and_busy_ones_are_not_free(client):
    def wait():
        Event("go").wait()

    busy = client.submit(wait, workers=[workers(client)["2"]])
    with run(client, "siirl-one", "0"):
        until(lambda: {*client.run_on_scheduler(free_workers)} == {"1"})
        assert {*client.run_on_scheduler(free_workers, "siirl-one")} == {"0", "1"}
    Event("go", client=client).set()
    busy.result()
    assert {*client.run_on_scheduler(free_workers)} == {"1", "2"}


def test_idle_workers_are_told_once_and_only_to_an_elastic_run(client):
    with (
        run(client, "siirl-fixed", "0", patience=0.5) as fixed,
        run(client, "siirl-elastic", "1", patience=0.5, elastic=True) as elastic,
    ):
        until(lambda: elastic() == [{"kind": "idle"}])
        assert (
            client.submit(lambda: this_worker().name, workers=[workers(client)["2"]]).result() == 2
        )
        assert fixed() == []


def test_a_worker_that_is_retired_is_told_as_one_that_left_in_order(client):
    with run(client, "siirl-one", "0", "1") as told:
        address = workers(client)["1"]
        client.retire_workers([address])
        until(told)
        event = told()[0]
    assert (event["kind"], event["member"], event["address"], event["in_order"]) == (
        "lost",
        "1",
        address,
        True,
    )


@pytest.mark.parametrize("elastic", [True, False])
def test_no_worker_is_shared_with_a_run_that_was_quicker(client, elastic):
    with run(client, "siirl-one", "0", "1"):
        used = client.run_on_scheduler(used_workers, None)
        assert set(used) == {workers(client)["0"], workers(client)["1"]}
        assert client.run_on_scheduler(used_workers, "siirl-one") == []
        with pytest.raises(PeerError, match="worker '1' was idle, and another run has taken it"):
            run(client, "siirl-two", "1", "2", elastic=elastic).__enter__()
        with run(client, "siirl-next", "1", elastic=elastic, follows="siirl-one"):
            pass
