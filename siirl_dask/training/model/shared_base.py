"""One network whose base several agents have in common: each sees it with adapters of its own
(LoRA), which learn.

MARFT (arXiv:2504.16129) gives each agent adapters over one frozen model, of which its code holds a
copy for each agent. Here a worker holds the base once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager

from torch import Tensor, nn

from siirl_dask.config import TrainerConfig
from siirl_dask.training.model.heads import PolicyNetwork
from siirl_dask.training.packing import MicroBatch


class AgentNetwork:
    """A PolicyNetwork with the adapters of one agent, at its temperature. Others leave their own in
    use, so each call chooses anew.
    """

    def __init__(
        self,
        network: PolicyNetwork,
        agent: str,
        temperature: float,
        trainer: TrainerConfig,
    ) -> None:
        self._network = network
        self._agent = agent
        self._temperature = temperature
        self._trainer = trainer
        self.inputs = network.inputs

    def __call__(self, batch: MicroBatch) -> tuple[Tensor, Tensor, Tensor]:
        scores: tuple[Tensor, Tensor, Tensor] = self._used()(batch)
        return scores

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield those of the base, and all agents' adapters."""
        return self._network.parameters()

    def trainable(self) -> dict[str, nn.Parameter]:
        """Return the agent's adapters, by their names in files."""
        return self._used().trainable()

    def rates(self) -> dict[str, float]:
        """Return the learning rates, in units of the agent's own, of adapters that have another
        one.
        """
        return self._used().rates(self._trainer)

    def matrices(self) -> set[str]:
        """Return no names: Muon steps no adapters."""
        return set()

    def merged(self, others: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Yield the parameters with the agent's adapters merged; ``others`` replace parameters
        of the same name.
        """
        return self._used().merged(others)

    def without_adapters(self) -> AbstractContextManager[None]:
        """Disable the adapters inside the ``with`` block."""
        return self._used().without_adapters()

    def reshard(self) -> None:
        """Free parameters that were gathered for passes without a backward."""
        self._network.reshard()

    def _used(self) -> PolicyNetwork:
        self._network.use(self._agent)
        self._network.temperature = self._temperature
        return self._network
