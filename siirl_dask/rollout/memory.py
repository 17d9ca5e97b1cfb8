"""Arithmetic of an engine's memory on an accelerator: weights, cache of keys and values, graphs, and room to compute.

On an accelerator vLLM's cache takes what is left, of which the plan says how much that is. Before it makes the cache it
runs a batch, and captures graphs, so these are within its share of the memory; the sampler's copies of the logits are
not. Graphs leave the device while the engine sleeps, and take pinned memory of the host instead.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from siirl_dask.config import Dtype, Engine, LoraConfig, RolloutConfig, Sampler, parse_bytes
from siirl_dask.models.architecture import Architecture
from siirl_dask.models.shapes import ModelSize
from siirl_dask.planner import Footprint, Remedy
from siirl_dask.rollout.adapter_choice import layer_rank, takes_layers

CACHE = "KV cache"
GRAPHS = "graphs"
_LOGITS = 4  # bytes of a logit
_CHUNK = {True: 4 * 2**20, False: 256 * 2**20}  # bytes of logits, on a CPU and elsewhere; 4 MiB stay in its cache
_CHUNK_COPIES = 2  # of a chunk's logits: probabilities, and half as much for their sums, or a mask
_VLLM_COPIES = 4  # log-probs, probabilities, noise, and their quotient
_SGLANG_COPIES = 7  # probabilities, log-probs, hashes, and noise and its sum with log-probs in float64
_GRAPHS = 10**9  # vLLM's logs tell of 0.5 to 1.5 GB for models of 7 billion parameters
_BATCHED = 16384  # vLLM's default tokens in a batch from 70 GiB of memory on; half of it below
_LARGE = 70 * 2**30
_LEAST_COLUMNS = 256  # of a cache of fixed shape
_BLOCK = 16  # tokens of a block of the cache
_LARGEST_TENSOR_PARALLEL = 8  # devices of one host, within which ranks can exchange every token's sums


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOnWorkers:
    """An engine, or one rank of it, on each of a role's workers."""

    size: ModelSize
    architecture: Architecture
    rollout: RolloutConfig
    dtype: Dtype
    longest: int
    """Tokens of the longest prompt and response."""
    vllm: bool
    """Whether it is vLLM's; else that of transformers."""
    memory: int = 0
    """Bytes of the accelerator; 0 where they are not known yet."""
    lora: LoraConfig | None = None
    """Adapters that it gets in place of weights; None: none."""

    @property
    def rows(self) -> int:
        """Rows in a batch of the engine."""
        ranks = self.rollout.tensor_parallel_size
        return (self.vllm and self.rollout.vllm.max_num_seqs) or self.rollout.max_rows * ranks

    @property
    def token_bytes(self) -> int:
        """Bytes of a token's keys and values on one rank, which has at least one head."""
        one = self.architecture
        heads = -(-one.kv_heads // self.rollout.tensor_parallel_size)
        return 2 * one.layers * heads * one.head_dim * self.dtype.itemsize

    @property
    def adapters(self) -> int:
        """Bytes of vLLM's room for adapters, in all linear layers; 0 where it has no layers for them."""
        if not self.vllm or self.lora is None or not takes_layers(self.dtype, self.rollout, self.lora, on_cpu=False):
            return 0
        one = self.architecture
        attention = 2 * one.hidden + 2 * one.queries + 2 * (one.hidden + one.keys)
        sides = attention + 3 * (one.hidden + one.intermediate)
        return one.layers * (layer_rank(self.lora) or 0) * sides * self.dtype.itemsize


def engine_footprint(engine: EngineOnWorkers, workers: int = 1) -> Footprint:
    """Return the engine's memory on one worker with its remedies; ``workers`` is the number of its role's workers."""
    found = tuple(Remedy(setting, _footprint(changed)) for setting, changed in _changes(engine, workers))
    return replace(_footprint(engine), remedies=found)


def graphs_bytes(rollout: RolloutConfig) -> int:
    """Return the bytes of vLLM's graphs on an accelerator; 0 where it captures none."""
    return 0 if rollout.vllm.enforce_eager else _GRAPHS


def sampler_chunk(*, on_cpu: bool) -> int:
    """Return the bytes of logits that tokens are drawn from at once."""
    return _CHUNK[on_cpu]


def cache_rows(rows: int) -> int:
    """Return the rows of the cache of fixed shape in which so many rows are decoded: a power of two."""
    return 1 << (rows - 1).bit_length()


def cache_columns(columns: int) -> int:
    """Return the columns of the cache of fixed shape for so many tokens of a row, of four sizes to a power of two."""
    if columns <= _LEAST_COLUMNS:
        return _LEAST_COLUMNS
    piece = 1 << (columns - 1).bit_length() - 3
    return -(-columns // piece) * piece


def _sampler(engine: EngineOnWorkers) -> int:
    """Return the bytes of all rows' logits in float32, and what drawing from them takes."""
    logits = _LOGITS * engine.rows * engine.architecture.vocabulary
    if (copies := {Sampler.vllm: _VLLM_COPIES, Sampler.sglang: _SGLANG_COPIES}.get(engine.rollout.sampler)) is not None:
        return logits * (1 + copies)
    return logits + _CHUNK_COPIES * min(logits, sampler_chunk(on_cpu=False))


def _footprint(engine: EngineOnWorkers) -> Footprint:
    size = engine.dtype.itemsize * engine.size.total
    rollout = engine.rollout
    sampler = {"sampler": _sampler(engine)}
    if rollout.engine is Engine.sglang:
        return _of_sglang(engine, size, sampler)
    if not engine.vllm:
        tokens = cache_rows(engine.rows) * cache_columns(engine.longest)
        cache = {"keys and values": tokens * engine.token_bytes}
        return Footprint(held={"weights": size}, working={**cache, **sampler}, loading=size)
    blocks = -(-engine.longest // _BLOCK) * _BLOCK
    given = rollout.vllm.kv_cache_memory
    weights = -(-size // rollout.tensor_parallel_size)
    held = {
        "weights": weights,
        CACHE: parse_bytes("rollout.vllm.kv_cache_memory", given) if given else blocks * engine.token_bytes,
        "workspace": _workspace(engine),
    }
    kept = {"weights": weights}
    if engine.adapters:
        held["adapters"] = kept["adapters"] = engine.adapters
    if graphs := graphs_bytes(rollout):
        held[GRAPHS] = graphs
    level = rollout.vllm.sleep_level
    share = rollout.vllm.gpu_memory_utilization
    sleeping = {f"sleeping {part}": size for part, size in kept.items()}
    always = level == 1 or bool(level and engine.adapters)  # nobody loads the folder's weights again
    pool = {f"sleeping {GRAPHS}": held[GRAPHS]} if level and GRAPHS in held else {}  # at either level, in pinned memory
    with_weights = tuple(part for part in (*kept, GRAPHS) if part in held)  # these wake together, before the cache
    return Footprint(
        held=held,
        working=sampler,
        leaves=(*with_weights, CACHE, "workspace") if level else (),
        moves=with_weights if level else (),
        host={**sleeping, **pool} if always else pool,
        spared=sleeping if level and not always else {},
        fills=None if given else CACHE,
        least=blocks * engine.token_bytes,
        share=None if given else share,
    )


def _of_sglang(engine: EngineOnWorkers, size: int, sampler: Mapping[str, int]) -> Footprint:
    """Return the memory of an engine that keeps weights on the device unless others follow, and no copy of them."""
    options = engine.rollout.sglang
    least = engine.longest * engine.token_bytes
    return Footprint(
        held={"weights": size, CACHE: least, GRAPHS: _GRAPHS},
        working=sampler,
        leaves=(CACHE,) if options.sleep else (),
        fills=CACHE,
        least=least,
        share=options.mem_fraction_static,
    )


def _workspace(engine: EngineOnWorkers) -> int:
    """Return the bytes of a forward pass over a batch: hidden states, queries, keys and values, and the MLP's."""
    one = engine.architecture
    tensor = engine.rollout.tensor_parallel_size
    default = _BATCHED // 2 if 0 < engine.memory < _LARGE else _BATCHED
    tokens = engine.rollout.vllm.max_num_batched_tokens or default
    attention = 2 * one.queries + 2 * one.keys
    return tokens * engine.dtype.itemsize * (4 * one.hidden + (attention + 3 * one.intermediate) // tensor)


def _changes(engine: EngineOnWorkers, workers: int) -> Sequence[tuple[str, EngineOnWorkers]]:
    """Return settings that need less memory, the mildest first."""
    found = []

    def take(setting: str, **fields: object) -> None:
        nonlocal engine
        engine = replace(engine, rollout=replace(engine.rollout, **fields))  # type: ignore[arg-type]
        found.append((f"rollout.{setting}", engine))

    if engine.vllm:
        vllm = engine.rollout.vllm
        if vllm.gpu_memory_utilization is not None:
            vllm = replace(vllm, gpu_memory_utilization=None)
            take("vllm.gpu_memory_utilization=null", vllm=vllm)
        if not vllm.sleep_level:
            vllm = replace(vllm, sleep_level=2)
            take("vllm.sleep_level=2", vllm=vllm)
        if _workspace(engine) > _workspace(_batched(engine, 4096)):
            vllm = replace(vllm, max_num_batched_tokens=4096)
            take("vllm.max_num_batched_tokens=4096", vllm=vllm)
    if engine.rollout.max_rows > 64:
        take("max_rows=64", max_rows=64)
    if engine.dtype is Dtype.float32:
        engine = replace(engine, dtype=Dtype.bfloat16)
        found.append(("model.dtype=bfloat16", engine))
    if not engine.vllm:
        return found
    ranks = 2 * engine.rollout.tensor_parallel_size
    while ranks <= _LARGEST_TENSOR_PARALLEL and not workers % ranks and not engine.architecture.heads % ranks:
        take(f"tensor_parallel_size={ranks}", tensor_parallel_size=ranks)
        ranks *= 2
    return found


def _batched(engine: EngineOnWorkers, tokens: int) -> EngineOnWorkers:
    vllm = replace(engine.rollout.vllm, max_num_batched_tokens=tokens)
    return replace(engine, rollout=replace(engine.rollout, vllm=vllm))
