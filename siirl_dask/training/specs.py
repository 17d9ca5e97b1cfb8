"""Backends of trained models: what the product asks of one before and while roles are built, and
where each one is.

A backend is a ``TrainerSpec``, by the name that ``trainer.backend`` has for it: one of
``TRAINERS``, or ``module:NAME`` of a user's own. Nobody else asks which backend it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

from siirl_dask.config import ImagesConfig, ModelConfig, TrainerConfig
from siirl_dask.context import Device, Rank
from siirl_dask.errors import ConfigError
from siirl_dask.models.routing import Routing
from siirl_dask.models.shapes import ModelSize
from siirl_dask.planner import load_named_spec

if TYPE_CHECKING:
    from siirl_dask.training.memory import ModelOnWorkers
    from siirl_dask.training.trainer import Critic, Trainer

T = TypeVar("T")
TRAINERS: Mapping[str, str] = MappingProxyType(
    {
        "torch": "siirl_dask.training.parallel.specs:TORCH",
        "fsdp": "siirl_dask.training.parallel.specs:FSDP",
        "megatron": "siirl_dask.training.megatron.spec:SPEC",
    }
)
"""Specs of the shipped backends, each imported when a run names it."""
TRAINER_KEYS = frozenset(each.name for each in fields(TrainerConfig)) - {"backend"}
"""Keys of ``trainer`` that a backend may read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleRequest:
    """Everything that a role's object is built from, on one of the role's workers."""

    device: Device
    rank: Rank
    model: ModelConfig
    """The model; its ``path`` is a folder on this host."""
    trainer: TrainerConfig
    temperature: float = 1.0
    """Temperature at which log-probs are taken; of no meaning to a critic."""
    images: ImagesConfig | None = None
    """Images of the rows; None where rows show none."""
    routing: Routing | None = None
    """Routes that rows have and the model replays; None: it chooses experts itself."""
    agent: str = ""
    base: tuple[str, ...] = ()
    """Agents whose adapters lie over one base, which the worker holds once, and the one of them
    that this policy is; none and no name where the policy has its weights to itself."""

    @property
    def options(self) -> Mapping[str, Any]:
        """Options of a backend of the user's own, ``trainer.backend_options``."""
        return self.trainer.backend_options


@dataclass(frozen=True, slots=True, kw_only=True)
class Division:
    """How a model and a micro-batch's tokens are divided among the workers of a role; 1 is
    undivided.
    """

    shards: int = 1
    """Workers over which the parameters of a replica are divided."""
    layer: int = 1
    """Workers that compute each layer together, and hold a part of it each."""
    norms: int = 1
    """Workers that have a part of the tokens each between attention and feed-forward layers."""
    row: int = 1
    """Workers that have a part of each row's tokens each."""
    rows: int = 1
    """Workers that compute the rows of all of them together."""
    prompts_once: bool = True
    """Whether a prompt that rows of a micro-batch share is computed once."""
    groups: Mapping[str, int] = field(default_factory=dict)
    """Sizes of the groups in which neighbouring ranks speak with each other, by config key;
    divisors of the workers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerMemory:
    """Arithmetic of the memory of a backend's models on one worker.
    ``siirl_dask.training.memory`` has its parts.
    """

    parameters: Callable[[ModelSize, TrainerConfig], int]
    """Function that counts the parameters of a replica, as all of its workers hold them."""
    held: Callable[[ModelOnWorkers], dict[str, int]]
    """Function that returns the bytes that a worker holds, by part; parts in ``float32`` are
    named so."""
    moments: Callable[[ModelOnWorkers], list[dict[str, int]]]
    """Function that returns the bytes of a pass, by part, at each of the moments that may be its
    peak."""
    gathered: Callable[[ModelSize, TrainerConfig, bool], int] = lambda size, trainer, learns: 0
    """Function that returns the bytes on a CPU of weights that are gathered for a pass, and if the
    model learns, of their gradients."""
    stepped_elsewhere: Callable[[ModelSize, TrainerConfig, int], int] = (
        lambda size, trainer, workers: 0
    )
    """Function that counts the parameters of a worker whose optimizer state others of the role's
    ``workers`` hold."""
    replicated: bool = False
    """Whether each worker has the whole model, which is loaded at once and whose parameters
    autocast converts."""
    shards_with: str | None = None
    """Shipped backend that divides what this one holds whole, with the same options; None: there
    is none."""


def _whole(trainer: TrainerConfig, workers: int) -> Division:
    return Division()


def _fits(trainer: TrainerConfig, model: ModelConfig, workers: int) -> None:
    """Check nothing: any model fits any number of workers."""


def _leaves_process(trainer: TrainerConfig) -> str:
    return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerSpec:
    """A backend of trained models. Its module is imported before a run starts, on a machine that
    may have no device.
    """

    name: str
    """Name for messages."""
    build_policy: Callable[[RoleRequest], Trainer]
    """Function that builds a policy that learns."""
    build_reference: Callable[[RoleRequest], Trainer] | None = None
    """Function that builds a policy that scores and never learns. None: there is none, and a run
    that needs one is refused."""
    build_critic: Callable[[RoleRequest], Critic] | None = None
    """Function that builds a critic. None: there is none, and a run that needs one is refused."""
    check: Callable[[TrainerConfig, ModelConfig, int], None] = _fits
    """Function that raises ConfigError unless packages are installed, the role's number of workers
    and the model fit each other, and options go together. A model that is not on this machine is
    checked by the builders."""
    division: Callable[[TrainerConfig, int], Division] = _whole
    """Function that returns how model and rows are divided among a role's number of workers."""
    reads: frozenset[str]
    """Keys of ``trainer`` that the backend goes by; a run that sets another one is refused.
    ``siirl_dask.config.agents.OPTIMIZING`` are those that ``Learner`` reads. Of a shipped backend
    the configuration says more: its options are checked where that is made."""
    sees_images: bool = False
    """Whether models see the images of rows."""
    replays_routes: bool = False
    """Whether policies replay the routes of rows (``rollout.router_replay``)."""
    scores_averages: bool = False
    """Whether policies score under the moving averages of their weights."""
    pads_families: bool = False
    """Whether rows of the families of ``siirl_dask.models.planned_models`` are padded, which
    plans say."""
    gathers: bool = False
    """Whether each pass gathers all weights, and an update scatters the gradients."""
    operators: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Libraries by fused operator, of ``siirl_dask.devices.operators``; an operator that is not
    named is torch's."""
    process: Callable[[TrainerConfig], str] = _leaves_process
    """Function that returns what a role changes in the whole process of its workers, where roles of
    one process must agree; an empty text: nothing."""
    memory: TrainerMemory | None = None
    """Memory of a worker. None: it is not estimated. ``trainer_spec("torch").memory`` is that of a
    whole model on each worker that learns by AdamW."""


def trainer_spec(backend: str) -> TrainerSpec:
    """Return the spec of ``trainer.backend``. ConfigError for one that cannot be loaded, or is
    no TrainerSpec.
    """
    return load_named_spec("trainer.backend", TRAINERS.get(backend, backend), TrainerSpec)


def own_specs(options: Mapping[str, Any]) -> Mapping[str, object]:
    """Return the spec of a role's ``trainer``, by its text, where it is the user's own."""
    trainer: TrainerConfig | None = options.get("trainer")
    if trainer is None or trainer.backend in TRAINERS:
        return {}
    return {trainer.backend: trainer_spec(trainer.backend)}


def division_of(trainer: TrainerConfig, workers: int) -> Division:
    """Return how a model with this trainer, and its rows, are divided among the ``workers`` of
    its role.
    """
    return trainer_spec(trainer.backend).division(trainer, workers)


def needed(
    build: Callable[[RoleRequest], T] | None, trainer: TrainerConfig, role: str
) -> Callable[[RoleRequest], T]:
    """Return ``build``, the builder of a ``role``. ConfigError where the backend has none."""
    if build is None:
        name = trainer_spec(trainer.backend).name
        raise ConfigError(
            f"trainer.backend={trainer.backend}: {name} builds no {role}; take trainer.backend=fsdp"
        )
    return build
