"""One episode: the policy's turns and the environment's answers become rows of tokens.

Sampled token ids are never encoded again, and each answer of the environment appends ids. An
episode has one row for each agent, and one more wherever the environment rewrites a history.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

from siirl_dask.environments import Action, Opening, Step, Text
from siirl_dask.nodes.episodes.episode_rows import (
    PROMPT_IMAGES,
    Item,
    PlayedEpisode,
    PlayedRow,
    Turn,
    is_number,
)
from siirl_dask.nodes.episodes.episode_texts import (
    Encoded,
    EpisodeTexts,
    InvalidAnswer,
    ShownImage,
    joined,
)
from siirl_dask.nodes.prompts import MAX_TOKENS
from siirl_dask.rollout import FinishReason, Generation, GenerationRequest, Sampling, Tokenizer
from siirl_dask.schema import PROMPT, PROMPT_IDS, ROW_ID

if TYPE_CHECKING:
    from siirl_dask.images.processor import ImageProcessor

_MASK_63_BITS = (1 << 63) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeRules:
    """Limits of every episode of a step, and how its tokens are sampled."""

    sampling: Sampling
    """``max_tokens`` is that of a row's response, the environment's tokens included."""
    turns: int
    turn_tokens: int | None
    """Most tokens of one turn; None: as many as the row may still have."""
    rows: int
    """Most rows of an episode."""
    agents: Sequence[str] = ()
    """Names of the agents, where there are several."""
    max_prompt_length: int
    """Most tokens before the first turn of a row."""
    context_length: int | None
    """Most tokens of a row; None: any number."""


@dataclass(slots=True)
class _History:
    """The history of one agent: its latest row."""

    row: PlayedRow
    number: int
    """Number of the row within its episode."""
    text: Text
    """The text of the row's prompt."""
    images: list[ShownImage]
    """Images that the row shows, in order."""


@dataclass(slots=True)
class Episode:
    """An episode that is being played. ``seed_of`` returns the seed of a row by its id."""

    item: Item
    rules: EpisodeRules
    tokenizer: Tokenizer
    seed_of: Callable[[int], int]
    version: int = 0
    """Version of the weights that sample now."""
    budget: int | None = None
    """Tokens that the policy may still sample in this step; None: any number."""
    processor: ImageProcessor | None = None
    """Processor of the images that prompts show; None: all are texts."""
    failure: str | None = None
    ended: bool = False
    _rows: list[PlayedRow] = field(default_factory=list)
    _histories: dict[str | None, _History] = field(default_factory=dict)
    """The latest history of each agent."""
    _agent: str | None = None
    """The agent whose turn it is."""
    _turn_count: int = 0
    _requested: int = 0
    """Tokens that the latest request was for."""
    _limited_by_budget: bool = False
    """Whether the budget, and no other limit, bounded the latest request."""
    _turn_unfinished: bool = False
    """Whether the latest turn continues in the next step, because the budget was spent."""
    _rewards_before_turn: dict[str | None, float] = field(default_factory=dict)
    """Rewards of agents that have not had a turn yet: they are added to their first turn."""
    _opening: Opening = field(default_factory=Opening)

    @property
    def texts(self) -> EpisodeTexts:
        """Encodes the environment's texts."""
        return EpisodeTexts(self.tokenizer, self.processor, self.item.get(PROMPT_IMAGES, ()))

    @property
    def rows(self) -> Sequence[PlayedRow]:
        """Its rows as far as they are played, in the order in which they began."""
        return self._rows

    @property
    def number(self) -> int:
        """Number of the episode in its step."""
        return int(self.item[ROW_ID])

    @property
    def budget_spent(self) -> bool:
        """Whether the policy may sample no more in this step."""
        return self.budget == 0

    def begin(self, opening: Opening) -> None:
        """Begin with the environment's answer to ``reset``. InvalidAnswer for a prompt that
        cannot be used.
        """
        self._opening = opening
        self._agent = self._checked_agent(opening.agent)
        encoded = None
        if opening.prompt is None and not opening.tools:
            encoded = self.texts.own_prompt(self.item[PROMPT], list(self.item[PROMPT_IDS]))
        self._begin_row(self._agent, self._prompt_text(), encoded)

    def request(self) -> GenerationRequest:
        """Return the request for the next turn."""
        history = self._histories[self._agent]
        row = history.row
        max_tokens = self._tokens_left(row)
        if self.rules.turn_tokens is not None:
            turn_length = 0
            if self._turn_unfinished:
                turn_length = len(row.response) - row.turns[-1].start
            max_tokens = min(max_tokens, self.rules.turn_tokens - turn_length)
        self._limited_by_budget = False
        if self.budget is not None and self.budget < max_tokens:
            self._limited_by_budget = True
            max_tokens = self.budget
        self._requested = max_tokens
        return GenerationRequest(
            prompt=[*row.prompt, *row.response],
            seed=self.seed_of(self.number * self.rules.rows + history.number),
            sampling=replace(self.rules.sampling, max_tokens=max_tokens),
            begun=len(row.response),
            images=tuple(shown.image for shown in history.images),
            image_starts=tuple(shown.start for shown in history.images),
        )

    def add_turn(self, generation: Generation) -> Action | None:
        """Append a sampled turn, and return it for the environment.

        None where the turn has not ended and continues in the next step.
        """
        row = self._histories[self._agent].row
        row.add_turn(generation, self.version, continues_turn=self._turn_unfinished)
        count = len(generation.token_ids)
        if self.budget is not None:
            self.budget -= count
        self._turn_unfinished = False
        if (
            generation.finish_reason is FinishReason.LENGTH
            and count == self._requested
            and self._limited_by_budget
        ):
            self._turn_unfinished = True
            return None
        turn = row.turns[-1]
        turn.reward += self._rewards_before_turn.pop(self._agent, 0.0)
        self._turn_count += 1
        token_ids = row.response[turn.start :]
        return Action(self.tokenizer.decode(token_ids, skip_special=True), token_ids, self._agent)

    def add_step(self, step: Step) -> None:
        """Apply the environment's answer to a turn; the episode may end with it. InvalidAnswer for
        one that cannot be used.
        """
        row = self._histories[self._agent].row
        row.turns[-1].state = digest(step.state)
        self._add_rewards(step.reward)
        for name, value in step.parts.items():
            if not is_number(value):
                raise InvalidAnswer(f"gave {value!r} for {name!r}: expected a finite number")
            row.parts[str(name)] = row.parts.get(str(name), 0.0) + float(value)
        if step.done:
            self._end(FinishReason.ENVIRONMENT)
        elif self._turn_count == self.rules.turns:
            self._end(FinishReason.TURNS)
        else:
            self._add_observation(step)

    def fail(self, reason: str) -> None:
        """End the episode without a reward."""
        if not self._rows:
            self._rows.append(PlayedRow(None, 0, list(self.item[PROMPT_IDS])))
        self.failure = reason
        for row in self._rows:
            row.reason = FinishReason.FAILED
        self.ended = True

    def result(self, worker: str) -> PlayedEpisode:
        """Return the episode, which has ended."""
        assert self.ended
        return PlayedEpisode(self._rows, worker, self.failure)

    def _prompt_text(self) -> Text:
        """Return the text that a history begins with: the environment's prompt, or the row's own
        one.
        """
        text: Text = self.item[PROMPT] if self._opening.prompt is None else self._opening.prompt
        if self._opening.tools and isinstance(text, str):
            raise InvalidAnswer(
                "has tools, and its prompt is a string: expected messages, for the model's chat "
                "template"
            )
        return text

    def _add_observation(self, step: Step) -> None:
        """Give the next agent the observation, in its row or at the beginning of a new one."""
        if step.agent is not None:
            self._agent = self._checked_agent(step.agent)
        history = self._histories.get(self._agent)
        if step.history is not None or history is None:
            text = self._prompt_text() if step.history is None else step.history
            self._begin_row(self._agent, joined(text, step.observation))
            return
        row = history.row
        encoded = self.texts.observation(
            history.text, step.observation, self._opening.tools, row.response[-1]
        )
        if len(encoded.ids) >= self._tokens_left(row):
            self._end(FinishReason.LENGTH)
            return
        self._add_images(history, encoded.images, len(row.prompt) + len(row.response))
        row.add_observation(encoded.ids)

    def _add_images(self, history: _History, images: Sequence[ShownImage], first: int) -> None:
        """Add the images among tokens of which the first has the index ``first`` in the row.
        InvalidAnswer for too many images.
        """
        moved = [image.moved(first) for image in images]
        history.images += moved
        if self.processor is not None:
            most = self.processor.settings.most
            if len(history.images) > most:
                raise InvalidAnswer(
                    f"showed {len(history.images)} images in a row: expected at most {most} "
                    "(images.most)"
                )
        for shown in moved:
            if shown.observed and shown.image.data:
                history.row.observed.append((shown.start, shown.image.data))

    def _begin_row(self, agent: str | None, text: Text, encoded: Encoded | None = None) -> None:
        """Begin a row with a text; ``encoded`` is its encoding, None where it is not encoded
        yet.
        """
        number = len(self._rows)
        rules = self.rules
        if number == rules.rows:
            raise InvalidAnswer(
                f"began row {number + 1} of an episode, a new history or an agent's first: "
                f"environments.rows_per_episode allows {rules.rows}"
            )
        if encoded is None:
            encoded = self.texts.prompt(text, self._opening.tools)
        longest = rules.max_prompt_length
        if rules.context_length is not None:
            longest = min(longest, rules.context_length - 1)
        if not 0 < len(encoded.ids) <= longest:
            raise InvalidAnswer(
                f"gave a prompt of {len(encoded.ids)} tokens: expected 1 to {longest}, the least "
                "of data.max_prompt_length and what the model can read"
            )
        segment = sum(row.agent == agent for row in self._rows)
        row = PlayedRow(agent, segment, encoded.ids)
        history = _History(row, number, encoded.text, [])
        self._rows.append(row)
        self._histories[agent] = history
        self._add_images(history, encoded.images, 0)

    def _tokens_left(self, row: PlayedRow) -> int:
        """Return how many more tokens the row may have."""
        limit = self.rules.sampling.max_tokens
        row_limit = self.item.get(MAX_TOKENS)
        if row_limit is not None:
            limit = min(limit, row_limit)
        if self.rules.context_length is not None:
            limit = min(limit, self.rules.context_length - len(row.prompt))
        return limit - len(row.response)

    def _add_rewards(self, reward: float | Mapping[str, float]) -> None:
        """Add the reward of a step: a number for the agent whose turn it was, or one for each of
        several agents.
        """
        if not isinstance(reward, Mapping):
            self._add_reward(self._agent, reward)
            return
        if not self.rules.agents:
            raise InvalidAnswer(
                f"gave the rewards {dict(reward)!r}: expected a number where environments.agents "
                "names none"
            )
        for agent, value in reward.items():
            self._add_reward(agent, value)

    def _add_reward(self, agent: str | None, reward: float) -> None:
        """Add a reward to the latest turn of an agent, or to its first one if it has not had a
        turn yet.
        """
        if not is_number(reward):
            raise InvalidAnswer(f"gave the reward {reward!r}: expected a finite number")
        turn = self._latest_turn(self._checked_agent(agent))
        if turn is not None:
            turn.reward += float(reward)
        else:
            self._rewards_before_turn[agent] = self._rewards_before_turn.get(agent, 0.0) + float(
                reward
            )

    def _latest_turn(self, agent: str | None) -> Turn | None:
        for row in reversed(self._rows):
            if row.agent == agent and row.turns:
                return row.turns[-1]
        return None

    def _checked_agent(self, agent: str | None) -> str | None:
        """Return the agent. InvalidAnswer for one that is not configured."""
        agents = self.rules.agents
        if agent not in (agents or (None,)):
            raise InvalidAnswer(
                f"named the agent {agent!r}: expected one of environments.agents={list(agents)}"
            )
        return agent

    def _end(self, reason: FinishReason) -> None:
        for history in self._histories.values():
            history.row.reason = reason
        self.ended = True


def digest(state: object) -> int:
    """Return a hash of a state that is the same in every process, at least 1; 0 for None.

    InvalidAnswer for a state that is not made of values.
    """
    if state is None:
        return 0
    packed = blake2b(_canonical_text(state).encode(), digest_size=8).digest()
    number = int.from_bytes(packed, "little") & _MASK_63_BITS
    return max(number, 1)


def _canonical_text(value: Any) -> str:
    """Return a text that is the same for equal values; sets and mappings are sorted."""
    if isinstance(value, tuple | list):
        return f"({','.join(map(_canonical_text, value))})"
    if isinstance(value, frozenset | set):
        return f"{{{','.join(sorted(map(_canonical_text, value)))}}}"
    if isinstance(value, Mapping):
        return _canonical_text(frozenset(value.items()))
    if getattr(type(value), "__repr__", None) is object.__repr__:
        raise InvalidAnswer(
            f"gave a state of type {type(value).__name__}: expected text, numbers, or tuples of "
            "them"
        )
    return repr(value)
