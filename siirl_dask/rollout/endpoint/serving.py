"""The state of an endpoint, apart from its HTTP server: it imports no web framework."""

from __future__ import annotations

from dataclasses import dataclass, field

from siirl_dask.config import EndpointConfig
from siirl_dask.rollout.endpoint.conversations import Conversation
from siirl_dask.rollout.endpoint.queue import AgentQueue
from siirl_dask.rollout.engine import RolloutEngine


@dataclass(slots=True)
class Serving:
    """The state that the handlers of one endpoint share."""

    engine: RolloutEngine
    queue: AgentQueue
    config: EndpointConfig
    episodes: dict[str, Conversation] = field(default_factory=dict)
    """Conversations of the episodes that are under way, by bearer token."""
    refused: int = 0
    """Requests that were refused."""
    overridden: int = 0
    """Requests that had sampling parameters, in place of which the run's were used."""
