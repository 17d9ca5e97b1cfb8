"""Prepares a process for vLLM, and undoes what vLLM changes there. Import this before vLLM."""

from __future__ import annotations

import gc
import importlib
import logging
import os
import random
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from siirl_dask.collectives import LOOPBACK, listening_at
from siirl_dask.devices import accelerator
from siirl_dask.models.broken_imports import any_changed
from siirl_dask.rollout.vllm_engine.installation import ENVIRONMENT

_REQUIRED = ("VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_USE_V2_MODEL_RUNNER")


def prepare() -> None:
    """Set the environment, and keep vLLM from optional packages that cannot be imported."""
    for name, value in ENVIRONMENT.items():
        if name in _REQUIRED:
            os.environ[name] = value
        else:
            os.environ.setdefault(name, value)
    # tqdm's own lock is one of multiprocessing, whose name outlives a worker that is killed: at the
    # end of a failed run Python would warn of it
    tqdm.set_lock(threading.RLock())
    # which vLLM calls over gloo and torch has renamed
    for name in ("all_gather_into_tensor", "reduce_scatter_tensor"):
        warnings.filterwarnings(
            "ignore", f".*torch.distributed.{name}` is deprecated", FutureWarning
        )
    # Linux ends a process that uses the tiles of AMX and has not asked for them. vLLM's attention in
    # bfloat16 does so on CPUs that have some, unless a large product of torch's has asked before.
    torch.cpu._init_amx()
    # it warns before it sets its own
    logging.getLogger("vllm").setLevel(os.environ["VLLM_LOGGING_LEVEL"])
    if any_changed():
        registry: Any = importlib.import_module("vllm.model_executor.models.registry")
        # the child process would import packages that are hidden or mended here
        if hasattr(registry, "_run_in_subprocess"):
            registry._run_in_subprocess = lambda function: function()


@contextmanager
def no_collections() -> Iterator[None]:
    """Let nobody collect garbage inside.

    vLLM does so twice as it shuts down, for the memory of a device, each time through all that this
    process has imported: half a second, for nothing on a CPU.
    """
    collect = gc.collect
    gc.collect = lambda generation=2: 0
    try:
        yield
    finally:
        gc.collect = collect


_LOADING = "vLLM loads the weights"
_STAGES = {
    "determine_available_memory": "vLLM compiles the model and measures its memory",
    "initialize_from_config": "vLLM makes its cache",
    "compile_or_warm_up_model": "vLLM compiles kernels and captures graphs",
}
"""Names of the parts of an engine's start after that, by the call of vLLM's executor that does
each."""


@contextmanager
def named_stages(stage: Callable[[str], AbstractContextManager[object]]) -> Iterator[None]:
    """Tell by ``stage`` what vLLM does while it starts inside: each part may take minutes, and
    reports nothing.
    """
    from vllm.v1.executor.uniproc_executor import UniProcExecutor  # not before it is prepared for

    begin = UniProcExecutor._init_executor
    call = UniProcExecutor.collective_rpc

    def named_begin(self: Any) -> None:
        with stage(_LOADING):
            begin(self)

    def named_call(self: Any, method: Any, *args: Any, **kwargs: Any) -> Any:
        with stage(_STAGES[method]) if method in _STAGES else nullcontext():
            return call(self, method, *args, **kwargs)

    UniProcExecutor._init_executor = named_begin
    UniProcExecutor.collective_rpc = named_call
    try:
        yield
    finally:
        UniProcExecutor._init_executor = begin
        UniProcExecutor.collective_rpc = call


@contextmanager
def untouched(host: str = LOOPBACK) -> Iterator[None]:
    """Restore random states and ``torch.set_num_threads``; vLLM's gloo sockets listen at
    ``host`` alone.
    """
    set_threads = torch.set_num_threads
    threads = torch.get_num_threads()
    python = random.getstate()
    numpy = np.random.get_state()
    try:
        with (
            listening_at(host),
            accelerator.forked_random_states(),
            warnings.catch_warnings(),
        ):
            # vLLM looks at names that torch is going to drop
            warnings.simplefilter("ignore", FutureWarning)
            yield
    finally:
        torch.set_num_threads = set_threads
        torch.set_num_threads(threads)
        random.setstate(python)
        np.random.set_state(numpy)
