"""An engine before it is built: a frozen description, data and functions, that is found by the
engine's name.

    SPEC = EngineSpec(name="mine", build=build)  # in my_package.py

    siirl-dask run CONFIG rollout.engine=my_package:SPEC 'rollout.engine_options={rows: 8}'

The product asks an engine's spec for everything that it must know before and while the engine is
built, and nothing outside an engine's own modules knows its name. Importing a spec imports no
library that generates: ``build`` does.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

from siirl_dask.config import (
    Config,
    Dtype,
    Engine,
    ImagesConfig,
    LoraConfig,
    ModelConfig,
    RolloutConfig,
    Sampler,
)
from siirl_dask.context import Device, Rank
from siirl_dask.errors import ConfigError, did_you_mean
from siirl_dask.planner import Footprint, Remedy, load_named_spec
from siirl_dask.rollout.engine import RolloutEngine
from siirl_dask.rollout.memory import Change, EngineOnWorkers, rows_of_all_ranks

if TYPE_CHECKING:
    from siirl_dask.images.processor import ImageProcessor

logger = logging.getLogger("siirl_dask.rollout")
ENGINES: Mapping[str, str] = MappingProxyType(
    {
        "vllm": "siirl_dask.rollout.vllm_engine:SPEC",
        "transformers": "siirl_dask.rollout.transformers_engine:SPEC",
        "sglang": "siirl_dask.rollout.sglang_engine:SPEC",
        "server": "siirl_dask.rollout.server_engine:SPEC",
    }
)
"""Names of the specs of shipped engines, in the order in which ``auto`` looks for one that is
installed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRole:
    """A role that an engine will be built for, as it is known before anything starts."""

    model: ModelConfig
    rollout: RolloutConfig
    config: Config
    """Configuration of the whole run."""
    images: ImagesConfig | None = None
    """Images of prompts; None: the role is given none."""
    lora: LoraConfig | None = None
    """Adapters that the engine gets in place of weights; None: none."""
    workers: int = 1
    """Number of workers of the role."""

    @property
    def options(self) -> Mapping[str, Any]:
        """``rollout.engine_options``: the options of an engine that is not shipped."""
        return self.rollout.engine_options

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt and response together."""
        return self.config.data.max_prompt_length + self.rollout.max_response_length


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInputs:
    """Everything that an engine, or one rank of it, is built from, on its worker."""

    model: ModelConfig
    """The model, whose ``path`` is a folder of this host."""
    rollout: RolloutConfig
    device: Device
    rank: Rank
    lora: LoraConfig | None = None
    """Adapters that the engine will get in place of weights, or each of ``agents``; None: none."""
    images: ImagesConfig | None = None
    """Images of prompts; None: the role is given none."""
    processor: ImageProcessor | None = None
    """Processor of these images; None where prompts show none."""
    agents: tuple[str, ...] = ()
    """Agents with adapters of their own over the engine's weights; none: it has one policy."""

    @property
    def options(self) -> Mapping[str, Any]:
        """``rollout.engine_options``: the options of an engine that is not shipped."""
        return self.rollout.engine_options


def _nothing() -> None:
    """Accept everything."""


def _accepted(rollout: RolloutConfig) -> None:
    """Accept every configuration."""


def _always() -> bool:
    return True


def _no_notes(role: EngineRole) -> Sequence[str]:
    return ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Installation:
    """The library that an engine needs, in this process."""

    library: str = ""
    """Name of the library in sentences."""
    found: Callable[[], bool] = _always
    """Returns whether the library is installed, without importing it."""
    check: Callable[[], None] = _nothing
    """Raises ConfigError, with the cure, unless it is installed as the engine needs it."""
    by_auto: bool = False
    """Whether ``rollout.engine=auto`` takes the engine where the library is installed."""
    check_passed_over: Callable[[RolloutConfig], None] = _accepted
    """Raises ConfigError for options that this engine alone reads, where ``auto`` takes another
    for lack of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Abilities:
    """Abilities of an engine; a run that needs more of it is refused before it starts."""

    samplers: tuple[Sampler, ...] = (Sampler.exact,)
    """Values of ``rollout.sampler``. ``exact``: a token is drawn by its row's seed, its position
    and its logits alone, as ``siirl_dask.rollout.token_sampling.TokenSampler`` does."""
    images: bool = False
    """Whether prompts may show images: the engine is a ``SeesImages``."""
    adapters: bool = False
    """Whether it takes adapters in place of weights: the engine is a ``TakesAdapters``."""
    routes: bool = False
    """Whether it records routed experts (``rollout.router_replay``): the engine is a
    ``RecordsRoutes``."""
    tensor_parallel: bool = False
    """Whether several workers can form one engine (``rollout.tensor_parallel_size``)."""
    drafts: bool = False
    """Whether it takes several tokens of a row in a pass where drafts of them are right
    (``rollout.draft_tokens``): the engine is a ``DraftsTokens``."""
    in_flight: bool = False
    """Whether it takes new weights while it generates (``rollout.in_flight``): the engine is a
    ``LoadsInFlight``."""
    process: bool = False
    """Whether it can be built in a process of its own (``rollout.process``): the module of its spec
    can be imported there by name, and it has nothing but its inputs. Where several workers form an
    engine, the rank in its inputs is that in the engine, with groups of these ranks alone."""


def _given_cache(rollout: RolloutConfig) -> int:
    """Return what the configuration gives: it is counted with any engine."""
    return rollout.cache_bytes


def _unknown_footprint(engine: EngineOnWorkers) -> Footprint | None:
    return None


def _no_changes(engine: EngineOnWorkers, workers: int) -> Sequence[Change]:
    return ()


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineMemory:
    """The memory of an engine on each of its workers, besides its weights."""

    on_workers: bool = True
    """Whether the engine computes on its workers, and has its weights there; False: elsewhere."""
    host_cache: Callable[[RolloutConfig], int] = _given_cache
    """Returns the bytes of the cache of keys and values in the host's memory, beside the
    weights, on a CPU."""
    footprint: Callable[[EngineOnWorkers], Footprint | None] = _unknown_footprint
    """Returns the memory on an accelerator, without remedies; None where it is not known."""
    changes: Callable[[EngineOnWorkers, int], Sequence[Change]] = _no_changes
    """``(engine, workers)`` gives settings that need less memory, the mildest first, each with the
    engine as it is with this one and all before it, and none that the configuration refuses.
    ``workers`` is the number of the role's workers that can form one engine."""

    def on_accelerator(self, engine: EngineOnWorkers, workers: int = 1) -> Footprint | None:
        """Return the memory on an accelerator with its remedies, for a role of so many workers
        that can form one engine; None: not known.
        """
        own = self.footprint(engine)
        if own is None:
            return None
        remedies = []
        for setting, changed in self.changes(engine, workers):
            footprint = self.footprint(changed)
            if footprint is not None:
                remedies.append(Remedy(setting, footprint))
        return replace(own, remedies=tuple(remedies))


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineMoves:
    """Moves of an engine's memory where other roles compute on its accelerator, and where it
    gets new weights.
    """

    sleeps: bool
    """Whether it gives back weights, cache and graphs while other roles compute."""
    forgets: bool
    """Whether it drops weights, instead of moving them to the host, where all of them are about
    to be replaced."""
    graphs: int
    """Bytes of captured graphs, which the host's memory has while the engine sleeps."""


class AdapterLayers(Protocol):
    """Returns whether an engine computes with adapters in layers of its own, instead of merging
    them into weights.
    """

    def __call__(
        self,
        dtype: Dtype,
        rollout: RolloutConfig,
        lora: LoraConfig,
        *,
        on_cpu: bool,
    ) -> bool: ...


def _no_layers(dtype: Dtype, rollout: RolloutConfig, lora: LoraConfig, *, on_cpu: bool) -> bool:
    return False


def _reads_once(rollout: RolloutConfig) -> bool:
    return True


def _unknown_moves(rollout: RolloutConfig) -> EngineMoves | None:
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """Facts of an engine that estimates of a step's seconds ask for."""

    rows: Callable[[RolloutConfig], int] = rows_of_all_ranks
    """Returns the most rows in a batch of the engine, on all its workers together."""
    reads_prompts_once: Callable[[RolloutConfig], bool] = _reads_once
    """Returns whether a prompt is read once for all its samples."""
    adapter_layers: AdapterLayers = _no_layers
    widens_head: bool = True
    """Whether the head's numbers are multiplied in float32 with ``model.float32_head``; False: they
    are only added up so."""
    moves: Callable[[RolloutConfig], EngineMoves | None] = _unknown_moves
    """Returns what moves while the engine sleeps, wakes and loads weights; None where that is
    not estimated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec:
    """An engine: what it needs, what it can do, and how it is built. Its functions are
    module-level ones.
    """

    name: str
    """Name in messages; that of a shipped engine is also the value of ``rollout.engine``."""
    build: Callable[[EngineInputs], RolloutEngine]
    """Builds the engine, or one rank of it, on its worker. ConfigError for a model that it
    cannot run."""
    check: Callable[[EngineRole], Sequence[str]] = _no_notes
    """Checks configuration and model before anything starts, where a model may be elsewhere;
    returns sentences for readers of a plan. ConfigError, which names the option, for what cannot
    work."""
    installation: Installation = field(default_factory=Installation)
    abilities: Abilities = field(default_factory=Abilities)
    memory: EngineMemory = field(default_factory=EngineMemory)
    facts: EngineFacts = field(default_factory=EngineFacts)
    advised: bool = True
    """Whether messages propose it in place of another engine: not one that needs more than an
    installation."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Environment variables that processes of workers need before anything is imported; one that
    is set stays."""


def engine_spec(engine: str) -> EngineSpec:
    """Return the spec of ``rollout.engine``: a shipped one by its name, of ``auto`` one that is
    installed here, or the one that ``module:NAME`` or ``file.py:NAME`` names, whose module is
    imported.

    ConfigError, with the nearest spelling, where there is no such spec, and for an ``auto`` whose
    library is broken. Whether the library of an engine with a name is installed is not asked:
    workers may have it.
    """
    if engine == Engine.auto:
        spec, passed_over = _auto()
        reasons = [f"{other.installation.library} is not installed" for other in passed_over]
        if not reasons:
            reasons = [f"{spec.installation.library} is installed"]
        logger.info("rollout.engine=auto takes %s: %s", spec.name, ", ".join(reasons))
        return spec
    if engine in ENGINES:
        return _shipped(engine)
    if ":" not in engine:
        names = [*ENGINES, str(Engine.auto)]
        near = did_you_mean(engine, names)
        raise ConfigError(
            f"rollout.engine={engine!r}: expected one of {names}, or module:NAME of an "
            f"EngineSpec{near}"
        )
    return load_named_spec("rollout.engine", engine, EngineSpec)


def own_specs(options: Mapping[str, Any]) -> Mapping[str, object]:
    """Return the spec of a role's ``rollout``, by its text, where it is the user's own."""
    rollout: RolloutConfig | None = options.get("rollout")
    if rollout is None or ":" not in rollout.engine:
        return {}
    return {rollout.engine: engine_spec(rollout.engine)}


def check_passed_over(rollout: RolloutConfig) -> None:
    """Raise ConfigError for options that an engine alone reads which ``auto`` passes over, since it
    is not installed here.
    """
    if rollout.engine != Engine.auto:
        return
    _, passed_over = _auto()
    for spec in passed_over:
        spec.installation.check_passed_over(rollout)


def process_environment(engine: str) -> dict[str, str]:
    """Return the environment variables that processes of workers need for ``rollout.engine``; for
    ``auto`` those of all engines that it may take, since workers may have what is not installed
    here.
    """
    if engine != Engine.auto:
        return dict(engine_spec(engine).environment)
    found: dict[str, str] = {}
    for spec in map(_shipped, ENGINES):
        if spec.installation.by_auto:
            found |= spec.environment
    return found


def alternatives(engine: str, able: Callable[[Abilities], bool] = lambda abilities: True) -> str:
    """Return the other shipped engines with an ability, as advice: ``rollout.engine=a or b``."""
    specs = {name: _shipped(name) for name in ENGINES if name != engine}
    names = [name for name, spec in specs.items() if spec.advised and able(spec.abilities)]
    return f"rollout.engine={' or '.join(names)}"


def _shipped(name: str) -> EngineSpec:
    return load_named_spec("rollout.engine", ENGINES[name], EngineSpec)


def _auto() -> tuple[EngineSpec, list[EngineSpec]]:
    """Return the engine that ``auto`` takes here, and those that it would have taken before it."""
    passed_over: list[EngineSpec] = []
    for spec in map(_shipped, ENGINES):
        if not spec.installation.by_auto:
            continue
        if spec.installation.found():
            spec.installation.check()
            return spec, passed_over
        passed_over.append(spec)
    raise ConfigError(
        "rollout.engine=auto: none of the engines that it takes is installed; name one"
    )
