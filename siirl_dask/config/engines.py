"""Engines that generate, with the options that only one of them reads."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any
from urllib.parse import urlsplit

from siirl_dask.config.checks import above, at_least, parse_bytes
from siirl_dask.errors import ConfigError, clause


class Engine(StrEnum):
    """Shipped engines that generate; see docs/engines.md."""

    transformers = "transformers"
    vllm = "vllm"
    sglang = "sglang"
    """Never chosen by ``auto``."""
    server = "server"
    """Servers of vLLM, or with ``rollout.sampler=sglang`` of SGLang, that are there already, at
    ``rollout.server.urls``. Never chosen by ``auto``."""
    auto = "auto"
    """vLLM if it is installed, else transformers."""


class Sampler(StrEnum):
    """Code that draws tokens; see docs/engines.md."""

    exact = "exact"
    """Ours: a token depends on its row's seed, its position and its logits alone, in any batch
    and with any engine."""
    vllm = "vllm"
    """vLLM's own, with a generator for each row."""
    sglang = "sglang"
    """SGLang's own: a token depends on its row's seed, its place in the sequence and its logits."""


@dataclass(kw_only=True, slots=True)
class VllmConfig:
    """``rollout.vllm``: options that only vLLM reads."""

    gpu_memory_utilization: float | None = None
    """Share of an accelerator's memory for weights and caches, unless ``kv_cache_memory`` is given.
    None: what the other roles on it leave, as ``plan`` says, at most 0.9."""
    kv_cache_memory: str | None = None
    """Size of a worker's cache of keys and values, such as ``4GiB``. None: 1GiB on a CPU."""
    max_num_seqs: int | None = None
    """Most rows in an engine's batch. None: ``rollout.max_rows`` for each of its workers."""
    max_num_batched_tokens: int | None = None
    """Most tokens in an engine's batch. None: vLLM's own choice."""
    enforce_eager: bool | None = None
    """Run without compiled graphs. None: on a CPU only."""
    enable_prefix_caching: bool = True
    """Read a prompt once for all its samples."""
    sleep_level: int = 2
    """Memory that the engine frees on an accelerator while other roles compute on it. 0: none. 1:
    the cache, and the weights move to the host's memory. 2: the same, but weights are forgotten
    where new ones follow in the same step, before anything else asks for them."""
    engine_kwargs: dict[str, Any] = field(default_factory=dict)
    """Any other argument of ``vllm.LLM``, such as ``{max_model_len: 4096}``."""

    def __post_init__(self) -> None:
        share = self.gpu_memory_utilization
        if share is not None and not 0 < share <= 1:
            raise ConfigError(
                f"rollout.vllm.gpu_memory_utilization={share}: expected more than 0, at most 1; or "
                "null, for what the other roles leave"
            )
        for name in ("max_num_seqs", "max_num_batched_tokens"):
            count = getattr(self, name)
            if count is not None:
                at_least("rollout.vllm", 1, **{name: count})
        if self.sleep_level not in (0, 1, 2):
            raise ConfigError(f"rollout.vllm.sleep_level={self.sleep_level}: expected 0, 1 or 2")
        cache = self.kv_cache_memory
        if cache is not None and parse_bytes("rollout.vllm.kv_cache_memory", cache) < 2**20:
            raise ConfigError(f"rollout.vllm.kv_cache_memory={cache!r}: expected at least 1MiB")
        if "tensor_parallel_size" in self.engine_kwargs:
            size = self.engine_kwargs["tensor_parallel_size"]
            raise ConfigError(
                f"rollout.vllm.engine_kwargs.tensor_parallel_size={size}: the workers of an engine "
                f"are the run's; give rollout.tensor_parallel_size={size} instead"
            )
        for name in ("kv_transfer_config", "kv_offloading_size"):
            if self.engine_kwargs.get(name) is not None:
                raise ConfigError(
                    f"rollout.vllm.engine_kwargs.{name}: vLLM would take keys and values to a place "
                    "outside its cache, and read prompts from those of older weights there; leave it "
                    "out"
                )


@dataclass(kw_only=True, slots=True)
class SglangConfig:
    """``rollout.sglang``: options that only SGLang reads."""

    mem_fraction_static: float | None = None
    """Share for weights and caches of the accelerator's memory that is free when SGLang starts.
    None: what the other roles on it leave, as ``plan`` says, at most 0.9."""
    attention_backend: str | None = None
    """Kernels of attention, of those that are deterministic in SGLang. None: triton with
    ``model.dtype=float32``, else SGLang's own choice."""
    disable_radix_cache: bool = False
    """Read each prompt anew for every sample."""
    sleep: bool = True
    """Free the cache while other roles compute on the accelerator, and the weights where new ones
    follow before anything else asks for them."""
    engine_kwargs: dict[str, Any] = field(default_factory=dict)
    """Any other argument of ``sglang.Engine``, such as ``{chunked_prefill_size: 2048}``."""

    def __post_init__(self) -> None:
        share = self.mem_fraction_static
        if share is not None and not 0 < share < 1:
            raise ConfigError(
                f"rollout.sglang.mem_fraction_static={share}: expected more than 0 and less than "
                "1; or null, for what the other roles leave"
            )


@dataclass(kw_only=True, slots=True)
class ServerConfig:
    """``rollout.server``: servers that generate, which a run uses and does not start."""

    urls: list[str] = field(default_factory=list)
    """Addresses of the servers, such as ``[http://10.0.0.7:8000]``: at least one for each worker
    that generates. A worker has servers of its own, whose weights it replaces."""
    weights_folder: str | None = None
    """Folder of this path on the workers and on the servers, such as one of a network's file
    system: new weights are written there, and read by the servers."""
    patience: float = 600.0
    """Seconds for which all servers of a worker may be out of reach, as while somebody starts them
    again, before the run fails."""
    timeout: float = 3600.0
    """Most seconds for one response, waiting in the server included."""

    def __post_init__(self) -> None:
        for url in self.urls:
            _check_url(url)
        places = self.places
        for url, place in zip(self.urls, places, strict=True):
            if places.count(place) > 1:
                raise ConfigError(
                    f"rollout.server.urls={self.urls}: {url} is there {places.count(place)} "
                    "times; expected each server once"
                )
        if self.weights_folder is not None and not self.weights_folder.startswith("/"):
            raise ConfigError(
                f"rollout.server.weights_folder={self.weights_folder!r}: expected an absolute "
                "path, the same on workers and servers"
            )
        above("rollout.server", 0, patience=self.patience, timeout=self.timeout)

    @property
    def places(self) -> list[tuple[str | None, int]]:
        """Host and port of each server, however its address is written."""
        return [_place(url) for url in self.urls]


def _check_url(url: str) -> None:
    """Raise ConfigError unless ``url`` is a server's: a scheme, a host, and perhaps a port."""
    expected = "expected a server's address, such as http://10.0.0.7:8000"
    try:
        parts = urlsplit(url)
        port = parts.port
        if parts.hostname:
            parts.hostname.encode("idna")
    except ValueError as error:
        raise ConfigError(f"rollout.server.urls: {url!r}: {clause(error)}; {expected}") from error
    has_blank = any(character.isspace() for character in url)
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0 or has_blank:
        raise ConfigError(f"rollout.server.urls: {url!r}: {expected}")
    if parts.username is not None or parts.password is not None:
        raise ConfigError(
            f"rollout.server.urls: the URL of {parts.hostname} has a user's name or a password, "
            f"which would be stored with the run; {expected}"
        )
    if parts.path.strip("/") or parts.query or parts.fragment:
        raise ConfigError(f"rollout.server.urls: {url!r}: leave out the path; {expected}")


def _place(url: str) -> tuple[str | None, int]:
    """Return host and port of a server, which may be written in several ways."""
    parts = urlsplit(url)
    usual = 80
    if parts.scheme == "https":
        usual = 443
    return parts.hostname, usual if parts.port is None else parts.port


def changed_options(
    group: str, options: VllmConfig | SglangConfig | ServerConfig
) -> dict[str, Any]:
    """Return an engine's options that differ from the defaults, by key, such as
    ``rollout.vllm.sleep_level``.
    """
    default = type(options)()
    given = {one.name: getattr(options, one.name) for one in fields(options)}
    return {
        f"{group}.{name}": value for name, value in given.items() if value != getattr(default, name)
    }
