"""Tests of how the ranks of an engine share their requests, in threads and without vLLM."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from siirl_dask.errors import Aborted, PeerError
from siirl_dask.images import Image
from siirl_dask.rollout import FinishReason, Generation, GenerationRequest, LocalQueue, Sampling
from siirl_dask.rollout.vllm_engine.tensor_parallel import (
    TensorParallelQueue,
    TensorParallelWeights,
)

REQUESTS = st.builds(
    GenerationRequest,
    st.lists(st.integers(0, 2**31), min_size=1, max_size=4),
    st.integers(0, 2**63 - 1),
    st.builds(Sampling, max_tokens=st.integers(1, 99), temperature=st.floats(0, 2)),
    st.integers(0, 3),
)
ONE = Sampling(max_tokens=1)


def gathering(count):
    """Return ``gather(rank)``, with which ``count`` threads gather from each other."""
    said, arrived = [b""] * count, [0] * count

    def gather(rank):
        def meet(message, check):
            said[rank] = message
            arrived[rank] += 1
            while min(arrived) < arrived[rank]:
                check()
                time.sleep(0.0002)
            heard = list(said)
            arrived[rank] += 1  # nobody may write its next message before all have read these
            while min(arrived) < arrived[rank]:
                time.sleep(0.0002)
            return heard

        return meet

    return gather


def together(count, function):
    """Run ``function(rank, gather)`` in ``count`` threads, which gather from each other."""
    gather = gathering(count)
    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(lambda rank: function(rank, gather(rank)), range(count)))


def echo(request):
    return Generation(
        [*request.prompt, request.seed % 97], [request.sampling.temperature], FinishReason.STOP
    )


@given(st.lists(st.lists(REQUESTS, max_size=5), min_size=1, max_size=4), st.integers(1, 4))
@settings(deadline=None)
def test_all_ranks_serve_all_requests_and_keep_their_own_results(asked, most):
    count = len(asked)

    def serve(rank, gather):
        own, seen = LocalQueue(asked[rank]), []
        queue = TensorParallelQueue(own, gather, rank=rank, size=count, version=3)
        while taken := queue.next(most, wait=True):
            assert len(taken) <= most
            for ticket, request in taken:
                seen.append(request)
                queue.complete(ticket, echo(request))
        assert queue.next(most, wait=False) == [], "nothing is gathered once all have ended"
        return own.results(), seen

    given = together(count, serve)
    assert [results for results, _ in given] == [
        [echo(request) for request in requests] for requests in asked
    ]
    for _, seen in given:
        assert seen == given[0][1]
    assert sorted(map(repr, given[0][1])) == sorted(
        repr(request) for requests in asked for request in requests
    )


class Turns:
    """Episodes whose next turn is there some calls after the answer to the one before, as when an
    environment takes its time.
    """

    def __init__(self, rank, delays):
        self.waits = {at: [*own] for at, own in enumerate(delays)}
        self.rank, self.asked, self.answers = rank, {}, {at: [] for at in self.waits}

    def next(self, limit, *, wait):
        assert not wait, "a wait here would keep the other ranks waiting"
        ready = []
        for at, left in self.waits.items():
            if left and at not in self.asked:
                left[0] -= 1
                if left[0] < 0 and len(ready) < limit:
                    self.asked[at] = GenerationRequest([self.rank, at, len(left)], at, ONE)
                    ready.append((at, self.asked[at]))
        return ready

    def ended(self):
        return not any(self.waits.values())

    def complete(self, at, result):
        self.answers[at].append(result)
        del self.asked[at]
        self.waits[at].pop(0)


@given(
    st.lists(st.lists(st.lists(st.integers(0, 3), max_size=3), max_size=3), min_size=2, max_size=3),
    st.integers(1, 5),
    st.randoms(use_true_random=False),
)
@settings(deadline=None, max_examples=50)
def test_turns_that_follow_from_results_are_served_in_one_order_on_all_ranks(delays, rows, chance):
    count, luck = len(delays), chance.randrange(2**30)

    def serve(rank, gather):
        own, order, running = Turns(rank, delays[rank]), [], []
        queue = TensorParallelQueue(own, gather, rank=rank, size=count, version=1)
        while True:
            if room := rows - len(running):
                taken = queue.next(room, wait=not running)
                assert len(taken) <= room
                running += taken
                order += [tuple(request.prompt) for _, request in taken]
            if not running:
                return own, order
            # the engine ends the same rows on all ranks
            ticket, request = running.pop((luck + len(order)) % len(running))
            queue.complete(ticket, echo(request))

    served = together(count, serve)
    for own, order in served:
        assert order == served[0][1]
        assert own.ended()
    for rank, (own, _) in enumerate(served):
        for at, answers in own.answers.items():
            turns = len(delays[rank][at])
            assert [answer.token_ids for answer in answers] == [
                [rank, at, left, at % 97] for left in range(turns, 0, -1)
            ]


def test_a_single_free_row_goes_to_each_rank_in_turn():
    def serve(rank, gather):
        own = LocalQueue([GenerationRequest([rank], at, ONE) for at in range(3)])
        queue, order = TensorParallelQueue(own, gather, rank=rank, size=2, version=0), []
        while taken := queue.next(1, wait=True):
            ((ticket, request),) = taken
            order += request.prompt
            queue.complete(ticket, echo(request))
        return order

    first, second = together(2, serve)
    assert first == second
    assert sorted(first) == [0, 0, 0, 1, 1, 1]
    assert first[:2] in ([0, 1], [1, 0])


def test_an_image_travels_once_however_many_turns_show_it():
    class Shows(LocalQueue):
        def next(self, limit, *, wait):
            return super().next(min(limit, 1), wait=wait)

    picture, sizes = Image(b"x" * 10_000), []

    def serve(rank, gather):
        asked = [GenerationRequest([1], at, ONE, images=(picture,)) for at in range(3)]
        own, seen = Shows(asked if rank else []), []

        def noting(message, check):
            sizes.append(len(message))
            return gather(message, check)

        queue = TensorParallelQueue(own, noting, rank=rank, size=2, version=0)
        while taken := queue.next(4, wait=True):
            for ticket, request in taken:
                seen.append(request.images[0].data)
                queue.complete(ticket, echo(request))
        return seen

    assert together(2, serve) == [[picture.data] * 3] * 2
    assert 10_000 < sum(sizes) < 12_000


def test_a_rank_that_is_told_to_stop_is_not_waited_for():
    stopped = threading.Event()

    class Stops(LocalQueue):
        def __init__(self, rank):
            super().__init__([GenerationRequest([1], 2, ONE)])
            self.rank = rank

        def next(self, limit, *, wait):
            if not self.rank:
                stopped.set()
                raise Aborted("a worker left")
            return super().next(limit, wait=wait)

        def ended(self):
            if stopped.is_set():
                raise Aborted("a worker left")
            return super().ended()

    def serve(rank, gather):
        queue = TensorParallelQueue(Stops(rank), gather, rank=rank, size=2, version=0)
        with pytest.raises(Aborted, match="a worker left"):
            queue.next(4, wait=True)

    together(2, serve)


def test_requests_for_other_weights_and_other_messages_are_refused():
    def queue_of(rank, gather, requests, version=1):
        own = LocalQueue(requests)
        return TensorParallelQueue(own, gather, rank=rank, size=2, version=version)

    def stale(rank, gather):
        queue = queue_of(rank, gather, [GenerationRequest([1], 2, ONE)], version=1 + rank)
        with pytest.raises(PeerError, match=r"weights of version [12]: those here are [12]"):
            queue.next(4, wait=True)

    together(2, stale)
    three = b"\x92\xc2\x93\xc0\xc0\xc0"  # [false, [nil, nil, nil]]: more than its share
    for message in (b"\xc1", b"\x01", b"\x91\x01", b"\xff" * 9, b"\x92\x01\x90", three):
        queue = queue_of(0, lambda own, check, message=message: [own, message], [])
        with pytest.raises(PeerError, match="generation request"):
            queue.next(4, wait=True)


class Arrivals:
    """Weights of versions 1, 2, .. that arrive at a rank when it has asked so often."""

    def __init__(self, at):
        self.at = [*at]
        self.asked = 0
        self.version = 0

    def arrived(self):
        self.asked += 1
        if self.version == len(self.at):
            return False
        return self.asked >= self.at[self.version]

    def load(self):
        assert self.asked >= self.at[self.version], "weights that are not there"
        self.version += 1


@given(
    st.lists(st.lists(st.integers(1, 30), min_size=2, max_size=2), min_size=1, max_size=4),
    st.lists(st.integers(1, 12), min_size=1, max_size=6),
)
@settings(deadline=None, max_examples=50)
def test_all_ranks_load_weights_between_the_same_two_steps(times, lengths):
    """When the last rank has them, and no later; each update has its time at either rank."""

    def serve(rank, gather):
        arrivals = Arrivals(sorted(at[rank] for at in times))
        own = LocalQueue([GenerationRequest([rank], length, ONE) for length in lengths])
        queue = TensorParallelQueue(own, gather, rank=rank, size=2, version=0)
        weights = TensorParallelWeights(arrivals, queue.gather, lambda: arrivals.version)
        running, versions = [], []
        while True:
            if room := 3 - len(running):
                for ticket, request in queue.next(room, wait=not running):
                    running.append([request.seed, ticket, request])
            if not running:
                return versions, arrivals.at
            while weights.arrived():
                weights.load()
            versions.append(arrivals.version)
            for row in running:
                row[0] -= 1
            for _, ticket, request in [row for row in running if not row[0]]:
                queue.complete(ticket, echo(request))
            running = [row for row in running if row[0]]

    (first, mine), (second, others) = together(2, serve)
    assert first == second
    asked, version = 0, 0
    for used in first:
        asked += 1
        while version < len(times) and asked >= max(mine[version], others[version]):
            version += 1
            asked += 1
        assert used == version


def test_ranks_with_different_weights_and_other_messages_are_refused():
    def differ(rank, gather):
        arrivals = Arrivals([1, 1, 1])
        arrivals.version = rank
        queue = TensorParallelQueue(LocalQueue([]), gather, rank=rank, size=2, version=0)
        weights = TensorParallelWeights(arrivals, queue.gather, lambda: arrivals.version)
        with pytest.raises(PeerError, match=r"version [01]: those here are [01]"):
            weights.arrived()

    together(2, differ)
    for message in (b"\xc1", b"\xa1x", b"\x90"):
        weights = TensorParallelWeights(
            Arrivals([1]), lambda own, message=message: [own, message], lambda: 0
        )
        with pytest.raises(PeerError, match=r"no version"):
            weights.arrived()
