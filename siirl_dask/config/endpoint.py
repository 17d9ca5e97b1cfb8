"""Config group of the OpenAI-compatible endpoint in front of an engine, and of the agents that
use it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from siirl_dask.config.checks import above, at_least, parse_bytes
from siirl_dask.errors import ConfigError

_NEEDED = ("model", "messages", "prompt", "n", "stream")
"""Fields of a request that decide what is answered: they cannot be left unread."""


@dataclass(kw_only=True, slots=True)
class EndpointConfig:
    """``endpoint``: the server that a rollout worker's agents talk to, its bounds, and how many
    agents run.
    """

    host: str = "127.0.0.1"
    """Address to listen on. Agents in the worker and their processes need no other than the
    default."""
    port: int = 0
    """Port of the role's first worker, the next one of the second, and so on; 0: any free port."""
    model: str = "policy"
    """Name of the model in requests."""
    max_body: str = "1MiB"
    """Largest body of a request."""
    max_messages: int = 256
    """Most messages of a chat request."""
    max_requests: int = 64
    """Most requests of an episode."""
    max_segments: int = 4
    """Most rows of an episode: a request whose history does not extend an earlier one begins
    another row."""
    ignore: list[str] = field(default_factory=list)
    """Fields of a request that are left unread where they ask for what the endpoint cannot do, such
    as ``response_format``; otherwise such a request is refused."""
    max_open: int | None = None
    """Most agents that run at once on a worker. None: four times ``rollout.max_rows``, or 32
    programs."""
    timeout: float = 300.0
    """Most seconds of an episode."""
    max_failures: int = 0
    """Most episodes of a step, over all workers, that may fail; the loss leaves them out."""

    @property
    def body_bytes(self) -> int:
        """Largest body in bytes."""
        return parse_bytes("endpoint.max_body", self.max_body)

    def __post_init__(self) -> None:
        at_least("endpoint", 1, max_messages=self.max_messages, max_requests=self.max_requests)
        at_least("endpoint", 1, max_segments=self.max_segments)
        at_least("endpoint", 0, max_failures=self.max_failures)
        above("endpoint", 0, timeout=self.timeout)
        if self.max_open is not None:
            at_least("endpoint", 1, max_open=self.max_open)
        if not 0 <= self.port < 65536:
            raise ConfigError(f"endpoint.port={self.port}: expected 0 to 65535")
        if self.body_bytes < 1024:
            raise ConfigError(f"endpoint.max_body={self.max_body!r}: expected at least 1KiB")
        if not self.model:
            raise ConfigError(
                "endpoint.model is empty: expected the name of the model in requests, such as "
                "policy"
            )
        needed = [name for name in self.ignore if name in _NEEDED]
        if needed:
            raise ConfigError(
                f"endpoint.ignore={self.ignore}: {needed[0]!r} cannot be left unread; leave it out"
            )
