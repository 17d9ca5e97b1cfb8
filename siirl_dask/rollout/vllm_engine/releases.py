"""Differences between releases of vLLM in what the engine asks of them: 0.32, and 0.23, which
vllm-ascend goes with.

What is asked is looked up where it is used, so that a release that has it is called as it says.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from vllm.config import set_current_vllm_config


def reload_weights(worker: Any, weights_iterator: Iterable[tuple[str, Tensor]]) -> None:
    """Load new weights; called in vLLM's worker. That of vllm-ascend 0.23 has no method for it,
    its runner has.
    """
    if hasattr(worker, "reload_weights"):
        worker.reload_weights(weights_iterator=weights_iterator)
        return
    with set_current_vllm_config(worker.vllm_config):
        worker.model_runner.reload_weights(weights_iterator=weights_iterator)


def use_logprobs_mode(worker: Any, mode: str) -> None:
    """Make the sampler report log-probs of ``mode``; called in vLLM's worker.

    vllm-ascend builds its sampler without the engine's ``logprobs_mode``, and would report those of
    the logits before any processor, silently.
    """
    sampler = worker.model_runner.sampler
    for part in (sampler, sampler.topk_topp_sampler):
        if part.logprobs_mode != mode:
            part.logprobs_mode = mode


def cache_usage(scheduler: Any) -> float:
    """Return the share of the cache of keys and values that is in use; 0.23's scheduler has no
    method for it.
    """
    if hasattr(scheduler, "get_kv_cache_usage"):
        return float(scheduler.get_kv_cache_usage())
    return float(scheduler.kv_cache_manager.usage)


def renames_of(mapper: Any) -> Any:
    """Return the part of a model's ``hf_to_vllm_mapper`` that renames layers of adapters; in
    0.23 all of it does.
    """
    return mapper.get_rename_mapper() if hasattr(mapper, "get_rename_mapper") else mapper
