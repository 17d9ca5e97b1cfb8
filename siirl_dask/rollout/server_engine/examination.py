"""Asks the servers that a configuration generates with what an engine asks them at its start, and
lets them go on where a worker left them paused.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from siirl_dask.config import Config, Engine, ModelConfig, RolloutConfig
from siirl_dask.errors import ConfigError, SiirlError
from siirl_dask.rollout.server_engine.engine import server_at

_PATIENCE = 30.0
"""Seconds for a server's answer; a run waits for rollout.server.patience. vLLM looks for its machine's
compilers, packages and drivers before its first one, for 4 seconds on two cores without a device."""
_START = (
    "start it as docs/engines.md says, on an address that this machine and the workers reach, or "
    "correct rollout.server.urls"
)
_OTHERS = "start it with other options, or change the key (docs/engines.md)"


@dataclass(frozen=True, slots=True)
class ExaminedServer:
    """A server, as it describes itself or with its fault."""

    url: str
    said: str
    """Its own description, or the fault."""
    cure: str = ""
    """The remedy of the fault; empty where there is none."""


def examine_servers(config: Config) -> list[ExaminedServer]:
    """Return what each server of the configuration and its agents is; nothing where no engine
    generates with servers. All are asked at once, and nothing is loaded.
    """
    return asyncio.run(_examine_all(config))


def let_go_on(config: Config) -> list[str]:
    """Let the servers of the configuration go on that were left paused; return a sentence about each.
    Those out of reach are passed over. Takes a minute at most.
    """
    # in a thread of its own: a notebook's has an event loop that runs
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, _let_all_go_on(config)).result()


async def _let_all_go_on(config: Config) -> list[str]:
    asked = [
        asyncio.create_task(_let_one_go_on(url, rollout))
        for _, rollout in _engines(config)
        for url in rollout.server.urls
    ]
    said = [await one for one in asked]
    return [sentence for sentence in said if sentence is not None]


async def _let_one_go_on(url: str, rollout: RolloutConfig) -> str | None:
    server = server_at(url, _impatient(rollout), 1, lambda: None)
    try:
        return await server.go_on()
    except SiirlError:
        return None  # another server than vLLM's is there by now
    finally:
        server.close()


async def _examine_all(config: Config) -> list[ExaminedServer]:
    asked = [
        asyncio.create_task(_examine(url, model, rollout))
        for model, rollout in _engines(config)
        for url in rollout.server.urls
    ]
    return [await finding for finding in asked]


def _engines(config: Config) -> Iterator[tuple[ModelConfig, RolloutConfig]]:
    """Yield model and options of each engine that generates with servers."""
    users: list[tuple[ModelConfig, RolloutConfig]] = [
        (agent.model, agent.rollout) for agent in config.agents.values()
    ]
    seen: set[tuple[str, ...]] = set()
    for model, rollout in [(config.model, config.rollout), *users]:
        urls = tuple(rollout.server.urls)
        if rollout.engine == Engine.server and urls not in seen:
            seen.add(urls)
            yield model, rollout


def _impatient(rollout: RolloutConfig) -> RolloutConfig:
    return replace(rollout, server=replace(rollout.server, timeout=_PATIENCE))


async def _examine(url: str, model: ModelConfig, rollout: RolloutConfig) -> ExaminedServer:
    server = server_at(url, _impatient(rollout), 1, lambda: None)
    try:
        found = await server.examine(patiently=False)
    except SiirlError as error:
        return ExaminedServer(url, str(error).removeprefix(f"{url}: "), _START)
    finally:
        server.close()
    try:
        server.check(model)
    except ConfigError as error:
        said, _, cure = str(error).removeprefix(f"{url}: ").rpartition("; ")
        if said:
            return ExaminedServer(url, said, cure)
        return ExaminedServer(url, cure, _OTHERS)
    return ExaminedServer(url, found.description)
