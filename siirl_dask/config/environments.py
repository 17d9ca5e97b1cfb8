"""Config group of environments: what a policy acts on over several turns, its tools, and their
limits.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from siirl_dask.config.checks import above, at_least, parse_bytes
from siirl_dask.errors import ConfigError

_LEAST_OBSERVATION = 64  # bytes: room for the word that says that a text was cut


class OnToolError(StrEnum):
    """Consequence of a tool that raises or takes too long."""

    text = "text"
    """The model gets the error as the tool's result, and the episode goes on."""
    failure = "failure"
    """The episode fails: it has no reward, and counts against ``environments.max_failures``."""


@dataclass(kw_only=True, slots=True)
class EnvironmentsConfig:
    """``environments``: the environments and tools that a policy acts on, where they run, and
    their limits.
    """

    environment: str | None = None
    """Class or factory of the environment of every row, as ``module:name`` or ``file.py:name``."""
    by_name: dict[str, str] = field(default_factory=dict)
    """Several environments instead of one, by name; the column ``name_column`` chooses a row's."""
    name_column: str = "environment"
    """Column with the name of a row's environment, for ``by_name``."""
    columns: list[str] = field(default_factory=lambda: ["prompt", "answer"])
    """Columns of a row that an environment is reset with; a dot leads into a struct."""
    tools: list[str] = field(default_factory=list)
    """Functions that the model may call, as ``module:function`` or ``file.py:function``."""
    mcp_servers: dict[str, str] = field(default_factory=dict)
    """Servers of tools that speak MCP, by name: a URL, or the command line that starts one, for
    each worker."""
    processes: int = 0
    """Processes on each worker that hold the environments and call the tools; 0: the worker
    itself does."""
    timeout: float | None = None
    """Most seconds for one call. Environments and tools that are not async need ``processes``
    for it."""
    concurrency: int = 64
    """Most calls under way at once on a worker, without ``processes``, each of which makes one
    at a time."""
    max_open: int | None = None
    """Most environments open at once on a worker; others wait for their turn. None: eight times the
    rows that the engine generates at once."""
    max_failures: int = 0
    """Most episodes of a step, over all workers, that may fail; the loss leaves them out."""
    max_failed_calls: float | None = None
    """Largest share of a step's calls of tools, over all workers, that may fail, such as 0.5.
    None: any."""
    on_tool_error: OnToolError = OnToolError.text
    """Consequence of a tool that raises or takes too long: ``text`` for the model, or
    ``failure`` of the episode."""
    max_observation: str = "64KiB"
    """Longest observation, or result of a tool, in bytes of UTF-8, such as ``64KiB``; a longer
    one is cut."""
    turns: int = 8
    """Most turns of an episode."""
    turn_tokens: int | None = None
    """Most tokens of one turn. None: what is left of ``rollout.max_response_length``."""
    agents: list[str] = field(default_factory=list)
    """Names of the agents, in an environment with several that decides who speaks. Empty: there
    is one."""
    rows_per_episode: int | None = None
    """Most rows of an episode: one for each agent, and one more wherever the environment rewrites a
    history. None: as many as there are agents."""

    @property
    def row_columns(self) -> list[str]:
        """Columns of a row that a session is given: those of the environment and, of several,
        its name.
        """
        chosen = []
        if self.by_name and self.name_column not in self.columns:
            chosen = [self.name_column]
        return [*self.columns, *chosen]

    def __post_init__(self) -> None:
        at_least("environments", 0, processes=self.processes, max_failures=self.max_failures)
        at_least("environments", 1, concurrency=self.concurrency, turns=self.turns)
        for name in ("max_open", "turn_tokens"):
            count = getattr(self, name)
            if count is not None:
                at_least("environments", 1, **{name: count})
        if self.max_failed_calls is not None and not 0 <= self.max_failed_calls <= 1:
            given = f"environments.max_failed_calls={self.max_failed_calls}"
            raise ConfigError(f"{given}: expected a share from 0 to 1, or null for any")
        if self.timeout is not None:
            above("environments", 0, timeout=self.timeout)
        self._check_agents()
        if parse_bytes("environments.max_observation", self.max_observation) < _LEAST_OBSERVATION:
            raise ConfigError(
                f"environments.max_observation={self.max_observation!r}: expected at least "
                f"{_LEAST_OBSERVATION} bytes"
            )
        if self.environment is not None and self.by_name:
            raise ConfigError(
                f"environments.environment={self.environment!r} and "
                f"environments.by_name={self.by_name}: expected one "
                "of them, the environment of every row or one for each name"
            )

    def _check_agents(self) -> None:
        """Raise ConfigError for agents of one name, and for fewer rows than there are agents."""
        twice = [name for name in self.agents if self.agents.count(name) > 1]
        if twice:
            raise ConfigError(
                f"environments.agents has {twice[0]!r} more than once: expected each name once"
            )
        least = max(1, len(self.agents))
        self.rows_per_episode = least if self.rows_per_episode is None else self.rows_per_episode
        if self.rows_per_episode < least:
            raise ConfigError(
                f"environments.rows_per_episode={self.rows_per_episode}: expected at least 1, and "
                f"one for each of the {len(self.agents)} agents (environments.agents)"
            )
