"""An OpenAI-compatible endpoint in front of a rollout worker's engine, and the agents that use
it.
"""

from siirl_dask.rollout.endpoint.agents import Agent, AgentRuns, Client, Outcome, ProgramEpisode
from siirl_dask.rollout.endpoint.conversations import Bounds, Conversation, Segment
from siirl_dask.rollout.endpoint.programs import Program
from siirl_dask.rollout.endpoint.queue import AgentQueue
from siirl_dask.rollout.endpoint.server import Endpoint

__all__ = [
    "Agent",
    "AgentQueue",
    "AgentRuns",
    "Bounds",
    "Client",
    "Conversation",
    "Endpoint",
    "Outcome",
    "Program",
    "ProgramEpisode",
    "Segment",
]
