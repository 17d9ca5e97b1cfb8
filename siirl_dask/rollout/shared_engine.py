"""One engine whose base several agents have in common: each sees an engine with adapters of its
own.

The rows of one agent are generated at a time, since a worker runs one node at a time. An engine
with layers for adapters has those of all agents, and each request names its agent's; another merges
an agent's adapters into the folder's weights when its turn comes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from siirl_dask.context import Rank, Sleeps
from siirl_dask.rollout.base_weights import Adapters
from siirl_dask.rollout.engine import (
    AdaptableEngine,
    Generation,
    RequestQueue,
    Sampling,
    Tokenizer,
    processor_of,
    serve_all,
)

if TYPE_CHECKING:
    from siirl_dask.images.processor import ImageProcessor


class SharedEngine:
    """An engine, and the adapters of each agent over its base."""

    def __init__(self, engine: AdaptableEngine) -> None:
        """``engine`` computes with the folder's weights."""
        self.engine = engine
        self._folder = Adapters()
        self._given: dict[str, Adapters] = {}
        self._in_use: Adapters | None = self._folder
        self._agents = set[str]()

    def open(self, agent: str) -> None:
        """Note that ``agent`` has the engine."""
        self._agents.add(agent)

    def of(self, agent: str) -> Adapters:
        """Return the adapters of ``agent``: none, of version 0, before it has got any."""
        return self._given.get(agent, self._folder)

    def give(self, agent: str, given: Adapters) -> None:
        """Replace the adapters of ``agent``."""
        self._given[agent] = given

    def use(self, agent: str) -> None:
        """Let the engine compute with the adapters of ``agent``."""
        if self._in_use is not self.of(agent):
            self._in_use = None  # it may fail half way
            self.engine.use_adapters(self.of(agent), agent)
            self._in_use = self.of(agent)

    def sleep(self, *, weights_follow: bool) -> None:
        """Put the engine to sleep. With ``weights_follow`` it may forget its weights, and ``use``
        gives it the adapters again.
        """
        if isinstance(self.engine, Sleeps):
            self.engine.sleep(weights_follow=weights_follow)
        if weights_follow:
            self._in_use = None

    def close(self, agent: str) -> None:
        """Close the engine when the last agent that has it does."""
        if self._agents == {agent}:
            self.engine.close()
        self._agents.discard(agent)


class AgentEngine:
    """A RolloutEngine with the adapters of one agent, over an engine that others have as well."""

    def __init__(self, shared: SharedEngine, agent: str) -> None:
        self.shared = shared
        """The engine whose memory this one takes: see ``Context.free_device``."""
        self._agent = agent
        shared.open(agent)

    @property
    def tokenizer(self) -> Tokenizer:
        """The engine's tokenizer."""
        return self.shared.engine.tokenizer

    @property
    def processor(self) -> ImageProcessor | None:
        """The engine's processor of images."""
        return processor_of(self.shared.engine)

    @property
    def context_length(self) -> int | None:
        """Most tokens of a prompt and its response together."""
        return self.shared.engine.context_length

    @property
    def version(self) -> int:
        """Version of the agent's adapters."""
        return self.shared.of(self._agent).version

    def serve(self, queue: RequestQueue) -> None:
        """Generate with the agent's adapters until the queue is empty."""
        self.shared.use(self._agent)
        self.shared.engine.serve(queue)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        seeds: Sequence[int],
        sampling: Sampling,
    ) -> list[Generation]:
        """Return one response per prompt, in order."""
        return serve_all(self, prompts, seeds, sampling)

    def load_weights(self, tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Refuse weights by TypeError: they would be those of all agents."""
        raise TypeError(
            "an engine whose base several agents have in common takes adapters alone: give "
            "publish_weights and load_weights the option lora"
        )

    def load_adapters(
        self,
        tensors: Iterable[tuple[str, Tensor]],
        scaling: float,
        version: int,
    ) -> None:
        """Generate the agent's rows with these adapters from now on. ValueError for those that
        do not fit.
        """
        self.shared.give(self._agent, self.shared.engine.fit_adapters(tensors, scaling, version))

    def sleep(self, *, weights_follow: bool = False) -> None:
        """Free device memory while others compute there."""
        self.shared.sleep(weights_follow=weights_follow)

    def leave_groups(self) -> bool:
        """Return whether the engine can go on with other process groups."""
        return self.shared.engine.leave_groups()

    def join_groups(self, rank: Rank) -> None:
        """Go on with other process groups."""
        self.shared.engine.join_groups(rank)

    def close(self) -> None:
        """Let go of the engine."""
        self.shared.close(self._agent)
