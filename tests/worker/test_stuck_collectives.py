"""A thread that waits for a peer which stands still goes on once its groups are aborted, or
their connections cut.
"""

import selectors
import socket

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import FakeProcessGroup

from siirl_dask import collectives
from siirl_dask.worker.groups import process_groups as groups
from siirl_dask.worker.groups.stuck_collectives import (
    end_collectives,
    epoll_descriptors,
    shut_down_connections,
)

DEVICE_BACKEND = "pretend"
"""Stands for nccl: it serves a device and no CPU."""


@pytest.fixture
def connected():
    """Both ends of a TCP connection."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = socket.create_connection(server.getsockname())
        other, _ = server.accept()
    with one, other:
        yield one, other


def test_connections_that_came_with_the_groups_are_cut_and_no_others(connected):
    one, other = connected
    with selectors.EpollSelector() as earlier:
        earlier.register(other, selectors.EVENT_READ)
        before = epoll_descriptors()
        assert earlier.fileno() in before
        with selectors.EpollSelector() as later:
            later.register(one, selectors.EVENT_READ)
            assert shut_down_connections(epoll_descriptors() - before) == 1
    one.settimeout(10)
    assert one.recv(1) == b""
    assert other.recv(1) == b""


def test_what_is_no_connection_stays(connected):
    before = epoll_descriptors()
    reading, writing = socket.socketpair()
    with (
        reading,
        writing,
        socket.create_server(("127.0.0.1", 0)) as server,
        selectors.EpollSelector() as later,
    ):
        for one in (reading, server):
            later.register(one, selectors.EVENT_READ)
        assert shut_down_connections(epoll_descriptors() - before) == 0
        writing.send(b"x")
        assert reading.recv(1) == b"x"
        socket.create_connection(server.getsockname()).close()


@pytest.fixture
def aborted(monkeypatch):
    """The backends of device groups that are aborted, in a process of one rank with two such
    groups and one of gloo.
    """
    if DEVICE_BACKEND not in dist.Backend.backend_list:
        make = lambda options, _: FakeProcessGroup._create_internal(  # noqa: E731
            options.group_rank, options.group_size
        )
        dist.Backend.register_backend(DEVICE_BACKEND, make, extended_api=True, devices=["cuda"])
    log = []
    monkeypatch.setattr(
        FakeProcessGroup, "abort", lambda backend: log.append(backend), raising=False
    )
    monkeypatch.setattr(
        dist.ProcessGroupGloo, "abort", lambda _: pytest.fail("gloo was aborted"), raising=False
    )
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group(
        f"cpu:gloo,cuda:{DEVICE_BACKEND}", store=dist.HashStore(), rank=0, world_size=1
    )
    dist.new_group([0], backend=DEVICE_BACKEND)
    dist.new_group([0], backend="gloo")
    yield log
    if dist.is_initialized():
        dist.destroy_process_group()


def test_every_group_of_devices_is_aborted_and_none_of_gloo(aborted):
    end_collectives([])
    assert len(aborted) == 2
    assert {*aborted} == {*collectives.device_backends()}


def test_groups_of_an_engines_own_world_are_aborted_too_while_it_is_entered_or_not(aborted):
    from siirl_dask.rollout.vllm_engine.process_groups import EngineWorld

    world = EngineWorld()
    with world.entered():
        dist.init_process_group(DEVICE_BACKEND, store=dist.HashStore(), rank=0, world_size=1)
        end_collectives([])
        assert len(aborted) == 3
    end_collectives([])
    assert len(aborted) == 6
    with world.entered():
        dist.destroy_process_group()


def test_connections_are_cut_also_where_the_abort_of_a_group_fails(aborted, monkeypatch, connected):
    one, other = connected

    def fail(backend):
        raise RuntimeError("no such communicator")

    monkeypatch.setattr(FakeProcessGroup, "abort", fail)
    with selectors.EpollSelector() as poll:
        poll.register(other, selectors.EVENT_READ)
        with pytest.raises(RuntimeError, match="no such communicator"):
            end_collectives([poll.fileno()])
    one.settimeout(10)
    assert one.recv(1) == b""


@pytest.mark.parametrize("stopped", [True, False])
def test_a_stopped_run_never_waits_for_what_is_under_way_on_its_devices(
    aborted, monkeypatch, stopped
):
    """destroy_process_group has nccl finish what is under way, and so waits for a peer that is
    gone.
    """
    destroyed = []
    destroy = dist.destroy_process_group
    monkeypatch.setattr(dist, "destroy_process_group", lambda: [destroyed.append(1), destroy()])
    groups.leave(abort=stopped)
    assert not dist.is_initialized()
    assert bool(destroyed) is not stopped
    assert collectives.device_backends() == []


def test_groups_of_gloo_alone_are_destroyed_since_its_abort_does_nothing(monkeypatch):
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    monkeypatch.setattr(
        dist.distributed_c10d, "_abort_process_group", lambda: pytest.fail("aborted")
    )
    groups.leave(abort=True)
    assert not dist.is_initialized()
