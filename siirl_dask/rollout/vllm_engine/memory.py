"""Arithmetic of the memory of vLLM's engine.

On an accelerator vLLM's cache takes what is left, of which the plan says how much that is. Before
it makes the cache it runs a batch, and captures graphs, so these are within its share of the
memory; the sampler's copies of the logits are not. Graphs leave the device while the engine sleeps,
and take pinned memory of the host instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from siirl_dask.config import RolloutConfig, Sampler, parse_bytes
from siirl_dask.planner import Footprint
from siirl_dask.rollout.memory import (
    CACHE,
    GRAPHS,
    GRAPHS_BYTES,
    Change,
    EngineOnWorkers,
    changed_rollout,
    common_changes,
    rows_of_all_ranks,
    sampler_bytes,
)
from siirl_dask.rollout.vllm_engine.adapter_choice import layer_rank, takes_layers

CPU_CACHE = "1GiB"
"""Default size of the cache of keys and values on a CPU: left to itself, vLLM takes 92 % of the
memory."""
# of the logits, in vLLM's own sampler: log-probs, probabilities, noise, and their quotient
_COPIES = 4
_BATCHED = 16384  # vLLM's default tokens in a batch from 70 GiB of memory on; half of it below
_LARGE = 70 * 2**30
_FEWER_BATCHED = 4096
_BLOCK = 16  # tokens of a block of the cache
# devices of one host, within which ranks can exchange every token's sums
_LARGEST_TENSOR_PARALLEL = 8


def rows_in_batch(rollout: RolloutConfig) -> int:
    """Return the most rows in a batch of the engine, on all its workers together."""
    if rollout.vllm.max_num_seqs:
        return rollout.vllm.max_num_seqs
    return rows_of_all_ranks(rollout)


def host_cache(rollout: RolloutConfig) -> int:
    """Return the bytes of the cache on a CPU."""
    if rollout.cache_bytes:
        return rollout.cache_bytes
    return parse_bytes("rollout.vllm.kv_cache_memory", CPU_CACHE)


def graphs_bytes(rollout: RolloutConfig) -> int:
    """Return the bytes of vLLM's graphs on an accelerator; 0 where it captures none."""
    return 0 if rollout.vllm.enforce_eager else GRAPHS_BYTES


def footprint(engine: EngineOnWorkers) -> Footprint:
    """Return the engine's memory on an accelerator, without remedies."""
    rollout = engine.rollout
    least = -(-engine.longest // _BLOCK) * _BLOCK * engine.token_bytes
    given = rollout.cache_bytes
    copies = _COPIES if rollout.sampler is Sampler.vllm else None
    adapters = _adapters(engine)
    graphs = graphs_bytes(rollout)
    stays_whole = {"weights": engine.weights}  # what an engine that sleeps must have somewhere
    if adapters:
        stays_whole["adapters"] = adapters
    held = {
        "weights": engine.weights,
        CACHE: given if given else least,
        "workspace": _workspace(engine),
        **stays_whole,
    }
    if graphs:
        held[GRAPHS] = graphs
    level = rollout.vllm.sleep_level
    sleeping = {f"sleeping {part}": size for part, size in stays_whole.items()}
    # at either level, in pinned memory
    pool = {f"sleeping {GRAPHS}": graphs} if level and graphs else {}
    always = level == 1
    if level and adapters:
        always = True  # nobody loads the folder's weights again
    # these wake together, before the cache
    with_weights = (*stays_whole, GRAPHS) if graphs else (*stays_whole,)
    return Footprint(
        held=held,
        working=sampler_bytes(engine, rows_in_batch(rollout), copies),
        leaves=(*with_weights, CACHE, "workspace") if level else (),
        moves=with_weights if level else (),
        host={**sleeping, **pool} if always else pool,
        spared=sleeping if level and not always else {},
        fills=None if given else CACHE,
        least=least,
        share=None if given else rollout.vllm.gpu_memory_utilization,
        share_key="rollout.vllm.gpu_memory_utilization",
    )


def changes(engine: EngineOnWorkers, workers: int) -> Sequence[Change]:
    """Return settings that need less memory, the mildest first; ``workers`` is the number of the
    role's workers that can form one engine.
    """
    found: list[Change] = []

    def take(setting: str, rollout: RolloutConfig | None) -> None:
        nonlocal engine
        if rollout is None:  # the configuration refuses it
            return
        engine = replace(engine, rollout=rollout)
        found.append((f"rollout.{setting}", engine))

    if engine.rollout.vllm.gpu_memory_utilization is not None:
        take("vllm.gpu_memory_utilization=null", _with(engine.rollout, gpu_memory_utilization=None))
    if not engine.rollout.vllm.sleep_level:
        take("vllm.sleep_level=2", _with(engine.rollout, sleep_level=2))
    fewer = _with(engine.rollout, max_num_batched_tokens=_FEWER_BATCHED)
    if fewer is not None and _workspace(engine) > _workspace(replace(engine, rollout=fewer)):
        take(f"vllm.max_num_batched_tokens={_FEWER_BATCHED}", fewer)
    for change in common_changes(engine):
        found.append(change)
        engine = change[1]
    ranks = 2 * engine.rollout.tensor_parallel_size
    while (
        ranks <= _LARGEST_TENSOR_PARALLEL
        and not workers % ranks
        and not engine.architecture.heads % ranks
    ):
        changed = changed_rollout(engine.rollout, tensor_parallel_size=ranks)
        take(f"tensor_parallel_size={ranks}", changed)
        ranks *= 2
    return found


def _with(rollout: RolloutConfig, **options: Any) -> RolloutConfig | None:
    """Return the configuration with other options of vLLM; None where it refuses them."""
    return changed_rollout(rollout, vllm=replace(rollout.vllm, **options))


def _adapters(engine: EngineOnWorkers) -> int:
    """Return the bytes of vLLM's room for adapters, in all linear layers; 0 where it has no
    layers for them.
    """
    lora = engine.lora
    if lora is None or not takes_layers(engine.dtype, engine.rollout, lora, on_cpu=False):
        return 0
    one = engine.architecture
    attention = 2 * one.hidden + 2 * one.queries + 2 * (one.hidden + one.keys)
    sides = attention + 3 * (one.hidden + one.intermediate)
    return one.layers * (layer_rank(lora) or 0) * sides * engine.dtype.itemsize


def _workspace(engine: EngineOnWorkers) -> int:
    """Return the bytes of a forward pass over a batch: hidden states, queries, keys and values,
    and the MLP's.
    """
    one = engine.architecture
    tensor = engine.rollout.tensor_parallel_size
    tokens = engine.rollout.vllm.max_num_batched_tokens
    if tokens is None:
        tokens = _BATCHED // 2 if 0 < engine.memory < _LARGE else _BATCHED
    attention = 2 * one.queries + 2 * one.keys
    return (
        tokens
        * engine.dtype.itemsize
        * (4 * one.hidden + (attention + 3 * one.intermediate) // tensor)
    )
