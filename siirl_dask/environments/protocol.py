"""The protocol of environments, and how the node that plays episodes talks to many of them at
once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Protocol, TypeAlias

Message: TypeAlias = Mapping[str, Any]
"""A chat message: ``role``, ``content``, and what else the chat template reads."""
Text: TypeAlias = str | Sequence[Message]
"""A text as it is, or chat messages for the model's chat template."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Opening:
    """How an episode begins."""

    prompt: Text | None = None
    """The text that the policy sees first; None is the row's own prompt."""
    tools: Sequence[Mapping[str, Any]] = ()
    """JSON schemas of the tools that the policy may call, for the chat template."""
    agent: str | None = None
    """Who speaks first, in an environment with several agents."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """The answer of an environment to a turn of the policy."""

    observation: Text | None = None
    """The text that is appended to the history of the agent that speaks next. A string becomes a
    user's message where the prompt is a chat, and is appended as it is where the prompt is a
    string."""
    reward: float | Mapping[str, float] = 0.0
    """Reward of the turn, for the agent that spoke, or by agent."""
    done: bool = False
    """Whether the episode ends here."""
    state: object = None
    """Hashable state that the turn was taken in, for advantages that compare turns in equal
    states; None is none."""
    history: Text | None = None
    """A new history in place of what the agent has seen so far: its next turn begins another row
    (segment)."""
    agent: str | None = None
    """Who speaks next, in an environment with several agents; None is the one that spoke."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """Numbers that are logged and stored beside the reward, by name."""


@dataclass(frozen=True, slots=True)
class Failure:
    """A call of an environment that gave no answer."""

    reason: str
    """The cause, without addresses or times: ``took more than 30 s``, ``raised ValueError:
    ...``."""


class Lost(Failure):
    """A call whose connection went: nothing that the policy did, so it is never a text for the
    model.
    """


@dataclass(frozen=True, slots=True)
class ToolCalls:
    """Well-formed calls of tools that were made, and those of them that failed."""

    calls: int = 0
    failed: int = 0
    reason: str = ""
    """The last failure."""


@dataclass(frozen=True, slots=True)
class Action:
    """One turn of the policy."""

    text: str
    """The sampled tokens as text, without special tokens."""
    token_ids: Sequence[int]
    """The sampled tokens."""
    agent: str | None = None
    """Who spoke, in an environment with several agents."""


Answer: TypeAlias = Opening | Step | Failure
OnAnswer: TypeAlias = Callable[[int, Answer], None]
"""``on_answer(episode, answer)``: called once for each ``reset`` and each ``step``, from any
thread."""


class Session(Protocol):
    """The episodes of one step on one worker. Leaving it closes every environment that is still
    open.

    No method blocks. At most one call of an episode is under way at a time; episodes do not wait
    for each other, but where more are open than may be: then a ``reset`` begins when another
    episode is closed.
    """

    def reset(self, episode: int, row: Mapping[str, Any], seed: int) -> None:
        """Make the episode's environment and reset it with the columns of its row. Answers
        Opening or Failure.
        """
        ...

    def step(self, episode: int, action: Action) -> None:
        """Give the policy's turn to the environment. Answers Step or Failure."""
        ...

    def close(self, episode: int) -> None:
        """Clean the episode's environment up. It answers nothing."""
        ...

    def __enter__(self) -> Session: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...


class Environments(Protocol):
    """The resource of a role that has environments
    (``siirl_dask.environments:build_environments``).
    """

    @property
    def max_failures(self) -> int:
        """Episodes of a step, over all workers, that may fail."""
        ...

    @property
    def columns(self) -> Sequence[str]:
        """Columns of a row that ``reset`` gets."""
        ...

    @property
    def max_failed_calls(self) -> float | None:
        """Share of a step's calls of tools, over all workers, that may fail; None: all."""
        ...

    def take_tool_calls(self) -> ToolCalls:
        """Return the calls of tools on this worker since this was called last."""
        ...

    def session(self, on_answer: OnAnswer) -> Session:
        """Return a session whose answers go to ``on_answer``."""
        ...

    def lasting_session(self, on_answer: OnAnswer) -> Session:
        """Return a session that was entered, for several steps: until it is left, or another one is
        asked for, or the environments are closed.
        """
        ...

    def close(self) -> None:
        """End the processes and threads of the environments."""
        ...
