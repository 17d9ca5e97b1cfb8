"""A read whose connection between hosts breaks is asked again; nothing else is, nor a read from
this host.
"""

import asyncio

import pytest

from siirl_dask.coordinator.transport.messages import (
    NOT_REPEATABLE,
    Op,
    Reply,
    Request,
    TransitionKey,
)
from siirl_dask.coordinator.transport.peers import PeerTransport
from siirl_dask.errors import PeerGone

KEY = TransitionKey("run", 1, "train/a->b")


class Breaking:
    """A carrier whose connection breaks a number of times before an answer comes."""

    def __init__(self, times, there=True):
        self.left, self.there, self.asked = times, there, 0

    async def reaches(self, worker):
        return self.there

    async def ask(self, worker, request):
        self.asked += 1
        self.left -= 1
        if self.left >= 0:
            raise ConnectionResetError("in the middle of an answer")
        return Reply({"n": self.asked})

    async def close(self):
        pass


def ask(op, *carriers):
    transport = PeerTransport("run", {"b": "tcp://10.0.0.2:1"}, carriers, peer_timeout=5)
    return asyncio.run(transport.request("b", Request(op, KEY)))


@pytest.mark.parametrize("op", [op for op in Op if op not in NOT_REPEATABLE])
def test_a_read_is_asked_again_when_its_connection_breaks(op):
    assert ask(op, Breaking(2)).header == {"n": 3}


@pytest.mark.parametrize("op", sorted(NOT_REPEATABLE))
def test_what_the_peer_may_have_done_is_asked_once(op):
    carrier = Breaking(1)
    with pytest.raises(
        PeerGone, match=f"{op} from worker 'b' at tcp://10.0.0.2:1: the peer is gone"
    ):
        ask(op, carrier)
    assert carrier.asked == 1


def test_a_connection_that_breaks_every_time_is_an_error():
    with pytest.raises(PeerGone, match="the peer is gone"):
        ask(Op.FETCH, Breaking(99))


def test_a_peer_on_this_host_is_asked_once_as_no_link_can_fail():
    near, far = Breaking(1), Breaking(0)
    with pytest.raises(PeerGone, match="the peer is gone"):
        ask(Op.FETCH, near, far)
    assert (near.asked, far.asked) == (1, 0)
