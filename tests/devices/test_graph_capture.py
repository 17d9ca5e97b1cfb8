"""How a step is captured as a graph, by a stand-in for torch.cuda that records the calls."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from siirl_dask.devices import accelerator

POOL = (0, 7)


class Cuda:
    """A stand-in for torch.cuda, with what of torch's allocator captures change.

    Where ``ends`` is False the driver has ended a capture with an error. Then torch's
    ``graph.__exit__`` raises before it leaves its stream (torch/cuda/graphs.py), and
    ``CUDAGraph::capture_end`` before it tells the allocator (aten/src/ATen/cuda/CUDAGraph.cpp).
    """

    def __init__(self):
        self.done = []
        self.ends = True
        self.current = "current"
        self.underway = []
        self.users_of_pool = 0
        self.streams = 0

    def graph_pool_handle(self):
        return POOL

    def Stream(self, device):
        self.streams += 1
        return self._stream("aside")

    def current_stream(self, device):
        return self._stream(self.current)

    def _stream(self, name):
        def wait_stream(other):
            self.done.append(f"{name} waits for {other.name}")

        return SimpleNamespace(name=name, wait_stream=wait_stream)

    @contextmanager
    def stream(self, stream):
        before = self.current
        self.current = stream.name
        try:
            yield
        finally:
            self.current = before

    def CUDAGraph(self):
        return SimpleNamespace(replay=lambda: self.done.append("replay"))

    def graph(self, graph, *, pool, stream, capture_error_mode):
        cuda = self

        class Capturing:
            def __enter__(self):
                self.before = cuda.current
                cuda.current = stream.name
                cuda.underway.append(pool)
                cuda.users_of_pool += 1
                cuda.done.append(f"capture, {capture_error_mode}")

            def __exit__(self, *error):
                if not cuda.ends:
                    raise RuntimeError("operation failed due to a previous error during capture")
                cuda.underway.remove(pool)
                cuda.current = self.before

        return Capturing()

    def end_allocate_to_pool(self, device, pool):
        if pool not in self.underway:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self.underway.remove(pool)

    def release_pool(self, device, pool):
        self.users_of_pool -= 1


@pytest.fixture
def cuda(monkeypatch):
    stand_in = Cuda()
    monkeypatch.setattr(torch, "cuda", stand_in)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", stand_in.end_allocate_to_pool)
    monkeypatch.setattr(torch._C, "_cuda_releasePool", stand_in.release_pool)
    accelerator._stream_of_captures.cache_clear()
    yield stand_in
    accelerator._stream_of_captures.cache_clear()


def test_a_step_warms_up_on_a_stream_apart_is_captured_once_and_replayed_in_shared_memory(cuda):
    """Another thread's allocations must not end a capture, as those of the default mode do."""
    capture = accelerator.graph_capture(torch.device("cuda", 0))
    once = [
        *("aside waits for current", "step on aside", "step on aside", "current waits for aside"),
        *("capture, thread_local", "step on aside"),
    ]

    def step():
        cuda.done.append(f"step on {cuda.current}")

    replay = capture(step)
    assert cuda.done == once
    replay()
    capture(step)
    assert cuda.done == [*once, "replay", *once]
    assert (cuda.current, cuda.underway, cuda.users_of_pool) == ("current", [], 2)


def test_captures_after_each_sleep_take_no_more_memory_for_streams(cuda):
    """Each stream has memory of cuBLAS's."""
    for _ in range(3):
        accelerator.graph_capture(torch.device("cuda", 0))(lambda: None)
    assert cuda.streams == 1


@pytest.mark.parametrize("ends", [True, False], ids=["the model raises", "the driver gives up"])
def test_a_step_that_cannot_be_captured_leaves_the_stream_and_the_allocator_as_they_were(
    cuda, ends
):
    """Everything after it would else be on the stream apart, and ``empty_cache`` would fail."""

    def step():
        if cuda.underway:
            raise RuntimeError("operation not permitted when stream is capturing")

    cuda.ends = ends
    with pytest.raises(RuntimeError, match="captur"):
        accelerator.graph_capture(torch.device("cuda", 0))(step)
    assert (cuda.current, cuda.underway) == ("current", [])
    # a graph that the driver has ended gives its pool back when it is destroyed
    assert cuda.users_of_pool == int(ends)


def test_graphs_are_of_cuda_alone():
    assert [accelerator.has_graphs(torch.device(kind)) for kind in ("cuda", "cpu", "meta")] == [
        True,
        False,
        False,
    ]
