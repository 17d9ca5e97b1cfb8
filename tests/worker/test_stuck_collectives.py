"""A thread that waits for a peer which stands still goes on once the connections of its groups are cut."""

import selectors
import socket

import pytest

from siirl_dask.worker.stuck_collectives import cut, polls


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
        before = polls()
        assert earlier.fileno() in before
        with selectors.EpollSelector() as later:
            later.register(one, selectors.EVENT_READ)
            assert cut(polls() - before) == 1
    one.settimeout(10)
    assert one.recv(1) == b""
    assert other.recv(1) == b""


def test_what_is_no_connection_stays(connected):
    before = polls()
    reading, writing = socket.socketpair()
    with reading, writing, socket.create_server(("127.0.0.1", 0)) as server, selectors.EpollSelector() as later:
        for one in (reading, server):
            later.register(one, selectors.EVENT_READ)
        assert cut(polls() - before) == 0
        writing.send(b"x")
        assert reading.recv(1) == b"x"
        socket.create_connection(server.getsockname()).close()
