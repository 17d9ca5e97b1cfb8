"""A read whose connection between hosts breaks is asked again; nothing else is, nor a read from
this host.
"""

import asyncio
import time

import pytest

from siirl_dask.coordinator.transport.messages import (
    NOT_REPEATABLE,
    Op,
    Reply,
    Request,
    TransitionKey,
)
from siirl_dask.coordinator.transport.peers import PeerTransport
from siirl_dask.errors import PeerError, PeerGone, SilentPeer

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


class Busy:
    """A carrier whose peer answers pings, or fails them, and nothing else."""

    def __init__(self, failure=None, process_runs=False):
        self.pings, self.failure, self.process_runs = 0, failure, process_runs

    async def reaches(self, worker):
        return True

    async def ask(self, worker, request):
        if request.op != Op.PING:
            await asyncio.Event().wait()
        self.pings += 1
        if self.failure is not None:
            raise self.failure
        return Reply()

    async def runs(self, worker, seconds):
        return self.process_runs

    async def close(self):
        pass


async def asked_of(carrier, timeout, on_silence):
    """Ask a peer that is watched, and never answers this."""
    transport = PeerTransport("run", {"b": "tcp://10.0.0.2:1"}, [carrier], timeout)
    transport.watch("b", on_silence)
    await transport.start()
    try:
        await transport.request("b", Request(Op.FETCH, KEY))
    finally:
        await transport.close()


@pytest.mark.parametrize("failure", [ConnectionRefusedError("no listener"), PeerError("no run")])
def test_a_peer_whose_pings_fail_ends_every_wait_for_it(failure):
    silent = []
    with pytest.raises(SilentPeer, match=r"no sign of life within 0\.3 s"):
        asyncio.run(asyncio.wait_for(asked_of(Busy(failure), 0.3, silent.append), 60))
    assert len(silent) == 1


@pytest.mark.parametrize("carrier", [Busy(), Busy(OSError(), process_runs=True)])
def test_a_peer_that_answers_pings_or_whose_process_runs_is_waited_for(carrier):
    silent = []
    with pytest.raises(TimeoutError):
        asyncio.run(asyncio.wait_for(asked_of(carrier, 0.3, silent.append), 1.5))
    assert carrier.pings
    assert silent == []


def test_a_peer_that_owes_an_answer_is_pinged_twenty_times_in_the_timeout_and_not_more():
    """Rounds that are further apart notice a death late; closer ones keep every peer busy."""
    carrier, timeout = Busy(), 2.0

    async def wait():
        transport = PeerTransport("run", {"b": "tcp://10.0.0.2:1"}, [carrier], timeout)
        await transport.start()
        asked = asyncio.create_task(transport.request("b", Request(Op.FETCH, KEY)))
        began = time.monotonic()
        while carrier.pings < 4:
            await asyncio.sleep(0.01)
        seconds = time.monotonic() - began
        asked.cancel()
        await transport.close()
        return seconds

    assert asyncio.run(asyncio.wait_for(wait(), 60)) >= 4 * timeout / 20
