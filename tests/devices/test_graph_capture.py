"""How a step is captured as a graph, by a stand-in for torch.cuda that records the calls."""

from contextlib import contextmanager
from types import SimpleNamespace

import torch

from siirl_dask.devices import accelerator


def test_a_step_warms_up_on_a_stream_apart_is_captured_once_and_replayed_in_shared_memory(
    monkeypatch,
):
    """Another thread's allocations must not end a capture, as those of the default mode do."""
    done = []

    class Stream:
        def __init__(self, name):
            self.name = name

        def wait_stream(self, other):
            done.append(f"{self.name} waits for {other.name}")

    @contextmanager
    def entered(name):
        done.append(name)
        yield
        done.append(f"end of {name}")

    class Graph:
        def replay(self):
            done.append("replay")

    def capturing(graph, *, pool, capture_error_mode):
        assert isinstance(graph, Graph)
        return entered(f"capture in {pool}, {capture_error_mode}")

    stand_in = SimpleNamespace(
        graph_pool_handle=lambda: f"pool {len(done)}",
        Stream=lambda device: Stream("aside"),
        current_stream=lambda device: Stream("current"),
        stream=lambda stream: entered(stream.name),
        CUDAGraph=Graph,
        graph=capturing,
    )
    monkeypatch.setattr(torch, "cuda", stand_in)
    capture = accelerator.graph_capture(torch.device("cuda", 0))
    once = [
        *(
            "aside waits for current",
            "aside",
            "step",
            "step",
            "end of aside",
            "current waits for aside",
        ),
        *("capture in pool 0, thread_local", "step", "end of capture in pool 0, thread_local"),
    ]
    replay = capture(lambda: done.append("step"))
    assert done == once
    replay()
    capture(lambda: done.append("step"))
    assert done == [*once, "replay", *once]


def test_graphs_are_of_cuda_alone():
    assert [accelerator.has_graphs(torch.device(kind)) for kind in ("cuda", "cpu", "meta")] == [
        True,
        False,
        False,
    ]
