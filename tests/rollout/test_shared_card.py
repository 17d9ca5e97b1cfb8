"""An engine of vLLM that sleeps on a card where other workers take memory meanwhile.

vLLM's own code of a sleep runs, that of its executor and of its worker for GPUs. Stand-ins are the
allocator and what the card says of its free memory.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: one of the extras cpu and gpu brings it")

import torch
from vllm.v1.executor.abstract import Executor
from vllm.v1.serial_utils import run_method
from vllm.v1.worker.gpu_worker import Worker
from vllm.v1.worker.worker_base import WorkerWrapperBase

from siirl_dask.context import Device, DeviceKind
from siirl_dask.rollout.vllm_engine.sleeping import VllmSleep

GIB = 2**30
ALONE = Device("w", DeviceKind.CUDA, 0, "GPU-5c3a/1")
SHARED = replace(ALONE, shared_by=2)


class Card:
    """The memory of a card, of which an engine has 20 GiB while it is awake."""

    def __init__(self, free):
        self.free = free
        self.awake = True
        self.taken_meanwhile = 0
        self.failure = None

    def suspend(self, level):
        if self.failure is not None:
            raise self.failure
        self.awake = False
        self.free += 20 * GIB - self.taken_meanwhile

    def resume(self, tags):
        self.awake = True


class GpuWorker(Worker):
    """vLLM's worker without a model."""

    def __init__(self, card):
        config = SimpleNamespace(enable_nccl_comm_suspend=False, sleep_preserve_parameter_names=())
        self.vllm_config = SimpleNamespace(model_config=config)
        self.model_config = config
        self._sleep_mode_backend = card
        self._sleep_saved_parameters = {}
        self._sleep_saved_buffers = {}
        self._sleep_saved_draft_buffers = {}
        self.model_runner = SimpleNamespace(model=torch.nn.Module())

    def get_draft_model(self):
        return None

    def synchronize_device(self):
        pass


class OneWorker(Executor):
    """vLLM's executor, with a worker that is there."""

    def __init__(self, worker):
        self.sleeping_tags = set()
        self.wrapper = WorkerWrapperBase.__new__(WorkerWrapperBase)
        self.wrapper.worker = worker

    def collective_rpc(self, method, args=(), kwargs=None):
        return [run_method(self.wrapper, method, args, kwargs or {})]

    def _init_executor(self):
        pass

    def check_health(self):
        pass


class Llm:
    """``vllm.LLM``, as far as a sleep needs it."""

    def __init__(self, executor):
        self.sleep = executor.sleep
        self.wake_up = executor.wake_up
        self.collective_rpc = executor.collective_rpc

    def apply_model(self, function):
        return [function(torch.nn.Module())]


@pytest.fixture
def card(monkeypatch):
    card = Card(free=10 * GIB)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: None)
    monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda: (card.free, 80 * GIB))
    return card


def engine_on(device, card):
    return VllmSleep(Llm(OneWorker(GpuWorker(card))), 2, device)


def test_an_engine_that_shares_its_card_sleeps_and_wakes_while_others_take_memory(card):
    engine = engine_on(SHARED, card)
    for _ in range(2):
        card.taken_meanwhile = 25 * GIB
        engine.begin(weights_follow=False)
        assert not card.awake
        card.free = 10 * GIB
        engine.end()
        assert card.awake, "the executor did not know that its worker slept"


def test_one_that_is_alone_on_its_card_fails_where_less_is_free_afterwards(card):
    card.taken_meanwhile = 25 * GIB
    with pytest.raises(AssertionError, match=r"^Memory usage increased after sleeping\.$"):
        engine_on(ALONE, card).begin(weights_follow=False)


@pytest.mark.parametrize(
    "failure",
    [
        AssertionError("Memory usage increased after sleeping. And the allocator lost a block."),
        AssertionError(),
        RuntimeError("Memory usage increased after sleeping."),
    ],
)
def test_no_other_failure_of_a_sleep_is_overlooked(card, failure):
    card.failure = failure
    with pytest.raises(type(failure)) as raised:
        engine_on(SHARED, card).begin(weights_follow=False)
    assert raised.value is failure


def test_a_vllm_that_compares_nothing_sleeps_as_before(card, monkeypatch):
    monkeypatch.setattr(GpuWorker, "sleep", lambda self, level: card.suspend(level))
    engine = engine_on(SHARED, card)
    engine.begin(weights_follow=False)
    assert not card.awake
    engine.end()
    assert card.awake
