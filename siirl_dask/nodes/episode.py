"""One episode: the policy's turns and the environment's answers become rows of tokens.

Token in, token out: what was sampled stays as it is, and each answer of the environment appends ids. An episode has one
row for each agent, and one more wherever the environment rewrites a history.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

from siirl_dask.environments import Action, Opening, Step, Text
from siirl_dask.nodes.episode_rows import SHOWN, Item, Played, PlayedRow, Turn, is_number
from siirl_dask.nodes.episode_texts import Encoded, EpisodeTexts, ShownImage, Unusable, joined
from siirl_dask.nodes.prompts import MAX_TOKENS
from siirl_dask.rollout import FinishReason, Generation, GenerationRequest, Sampling, Tokenizer
from siirl_dask.schema import PROMPT, PROMPT_IDS, ROW_ID

if TYPE_CHECKING:
    from siirl_dask.images.processor import ImageProcessor

_MASK = (1 << 63) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """Limits of every episode of a step, and how its tokens are sampled."""

    sampling: Sampling
    """``max_tokens`` is that of a row's response, the environment's tokens included."""
    turns: int
    turn_tokens: int | None
    """Most tokens of one turn; None: what is left."""
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
    """The history of one agent: the row that it is in."""

    row: PlayedRow
    number: int
    """Number of the row within its episode."""
    began: Text
    """The text that the row's prompt was made of."""
    images: list[ShownImage]
    """Images that the row shows, in order."""


@dataclass(slots=True)
class Episode:
    """An episode under way. ``seed_of`` gives the seed of a row by its id."""

    item: Item
    rules: Rules
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
    """The latest of each agent."""
    _speaker: str | None = None
    _turns: int = 0
    _asked: int = 0
    """Tokens that the latest request was for."""
    _cut: bool = False
    """Whether the budget, and no other limit, bounded it."""
    _goes_on: bool = False
    """Whether the latest turn has not ended, because the budget was spent."""
    _owed: dict[str | None, float] = field(default_factory=dict)
    """Rewards of agents that have not spoken yet."""
    _opening: Opening = field(default_factory=Opening)

    @property
    def texts(self) -> EpisodeTexts:
        """Encodes what the environment says."""
        return EpisodeTexts(self.tokenizer, self.processor, self.item.get(SHOWN, ()))

    @property
    def number(self) -> int:
        """Number of the episode in its step."""
        return int(self.item[ROW_ID])

    @property
    def spent(self) -> bool:
        """Whether the policy may sample no more in this step."""
        return self.budget == 0

    def begin(self, opening: Opening) -> None:
        """Begin with what ``reset`` answered. Unusable for a prompt that cannot be one."""
        self._opening, self._speaker = opening, self._known(opening.agent)
        encoded = None
        if opening.prompt is None and not opening.tools:
            encoded = self.texts.own_prompt(self.item[PROMPT], list(self.item[PROMPT_IDS]))
        self._begin_row(self._speaker, self._first_text(), encoded)

    def request(self) -> GenerationRequest:
        """Return the request for the turn of the agent whose turn it is."""
        history = self._histories[self._speaker]
        room, said = self._room(history.row), history.row.response
        if self.rules.turn_tokens is not None:
            begun = len(said) - history.row.turns[-1].start if self._goes_on else 0
            room = min(room, self.rules.turn_tokens - begun)
        self._cut = self.budget is not None and self.budget < room
        self._asked = room = self.budget if self._cut and self.budget is not None else room
        return GenerationRequest(
            [*history.row.prompt, *said],
            self.seed_of(self.number * self.rules.rows + history.number),
            replace(self.rules.sampling, max_tokens=room),
            begun=len(said),
            images=tuple(shown.image for shown in history.images),
            image_starts=tuple(shown.start for shown in history.images),
        )

    def say(self, generation: Generation) -> Action | None:
        """Append the turn of the agent whose turn it is, and return it for the environment.

        None where the turn has not ended and goes on in the next step.
        """
        row = self._histories[self._speaker].row
        row.say(generation, self.version, goes_on=self._goes_on)
        count = len(generation.token_ids)
        if self.budget is not None:
            self.budget -= count
        self._goes_on = self._cut and count == self._asked and generation.finish_reason is FinishReason.LENGTH
        if self._goes_on:
            return None
        row.turns[-1].reward += self._owed.pop(self._speaker, 0.0)
        self._turns += 1
        token_ids = row.response[row.turns[-1].start :]
        return Action(self.tokenizer.decode(token_ids, skip_special=True), token_ids, self._speaker)

    def hear(self, step: Step) -> None:
        """Take the environment's answer to a turn; the episode may end with it. Unusable for what is no answer."""
        row = self._histories[self._speaker].row
        row.turns[-1].state = digest(step.state)
        self._reward(step.reward)
        for name, value in step.parts.items():
            if not is_number(value):
                raise Unusable(f"gave {value!r} for {name!r}: expected a finite number")
            row.parts[str(name)] = row.parts.get(str(name), 0.0) + float(value)
        if step.done:
            self._end(FinishReason.ENVIRONMENT)
        elif self._turns == self.rules.turns:
            self._end(FinishReason.TURNS)
        else:
            self._go_on(step)

    def fail(self, reason: str) -> None:
        """End the episode without a reward."""
        if not self._rows:
            self._rows.append(PlayedRow(None, 0, list(self.item[PROMPT_IDS])))
        self.failure = reason
        for row in self._rows:
            row.reason = FinishReason.FAILED
        self.ended = True

    def result(self, worker: str) -> Played:
        """Return the episode, which has ended."""
        assert self.ended
        return Played(self._rows, worker, self.failure)

    def _first_text(self) -> Text:
        text: Text = self.item[PROMPT] if self._opening.prompt is None else self._opening.prompt
        if self._opening.tools and isinstance(text, str):
            raise Unusable("has tools, and its prompt is a string: expected messages, for the model's chat template")
        return text

    def _go_on(self, step: Step) -> None:
        """Let the next agent hear the observation, in its row or at the beginning of a new one."""
        self._speaker = self._known(step.agent) if step.agent is not None else self._speaker
        history = self._histories.get(self._speaker)
        if step.history is not None or history is None:
            text = self._first_text() if step.history is None else step.history
            self._begin_row(self._speaker, joined(text, step.observation))
            return
        row, tools = history.row, self._opening.tools
        heard = self.texts.observation(history.began, step.observation, tools, row.response[-1])
        if len(heard.ids) >= self._room(row):
            self._end(FinishReason.LENGTH)
            return
        self._show(history, heard.images, len(row.prompt) + len(row.response))
        row.hear(heard.ids)

    def _show(self, history: _History, images: Sequence[ShownImage], begin: int) -> None:
        """Note images among tokens that begin at place ``begin`` of the row. Unusable where they become too many."""
        moved = [image.moved(begin) for image in images]
        history.images += moved
        if self.processor is not None and len(history.images) > (most := self.processor.settings.most):
            raise Unusable(f"showed {len(history.images)} images in a row: expected at most {most} (images.most)")
        history.row.observed += [(one.start, one.image.data) for one in moved if one.observed and one.image.data]

    def _begin_row(self, agent: str | None, text: Text, encoded: Encoded | None = None) -> None:
        number, rules = len(self._rows), self.rules
        if number == rules.rows:
            raise Unusable(
                f"began row {number + 1} of an episode, a new history or an agent's first: "
                f"environments.rows_per_episode allows {rules.rows}"
            )
        encoded = encoded or self.texts.prompt(text, self._opening.tools)
        ids, longest = encoded.ids, rules.max_prompt_length
        if rules.context_length is not None:
            longest = min(longest, rules.context_length - 1)
        if not 0 < len(ids) <= longest:
            raise Unusable(
                f"gave a prompt of {len(ids)} tokens: expected 1 to {longest}, the least of data.max_prompt_length and "
                "what the model can read"
            )
        segment = sum(row.agent == agent for row in self._rows)
        self._rows.append(PlayedRow(agent, segment, ids))
        self._histories[agent] = history = _History(self._rows[-1], number, encoded.text, [])
        self._show(history, encoded.images, 0)

    def _room(self, row: PlayedRow) -> int:
        """Return how many more tokens the row may have."""
        limit, own = self.rules.sampling.max_tokens, self.item.get(MAX_TOKENS)
        room = (limit if own is None else min(limit, own)) - len(row.response)
        if self.rules.context_length is not None:
            room = min(room, self.rules.context_length - len(row.prompt) - len(row.response))
        return room

    def _reward(self, reward: float | Mapping[str, float]) -> None:
        """Add a reward to the latest turn of each agent that it is for."""
        if isinstance(reward, Mapping) and not self.rules.agents:
            raise Unusable(f"gave the rewards {dict(reward)!r}: expected a number where environments.agents names none")
        rewards = reward if isinstance(reward, Mapping) else {self._speaker: reward}
        for agent, value in rewards.items():
            if not is_number(value):
                raise Unusable(f"gave the reward {value!r}: expected a finite number")
            if (turn := self._last_turn(self._known(agent))) is not None:
                turn.reward += float(value)
            else:
                self._owed[agent] = self._owed.get(agent, 0.0) + float(value)

    def _last_turn(self, agent: str | None) -> Turn | None:
        said = (row.turns[-1] for row in reversed(self._rows) if row.agent == agent and row.turns)
        return next(said, None)

    def _known(self, agent: str | None) -> str | None:
        agents = self.rules.agents
        if agent not in (agents or (None,)):
            raise Unusable(f"named the agent {agent!r}: expected one of environments.agents={list(agents)}")
        return agent

    def _end(self, reason: FinishReason) -> None:
        for history in self._histories.values():
            history.row.reason = reason
        self.ended = True


def digest(state: object) -> int:
    """Return a hash of a state that is the same in every process; 0 for None. Unusable for a state without a value."""
    if state is None:
        return 0
    packed = blake2b(_spelled(state).encode(), digest_size=8).digest()
    return int.from_bytes(packed, "little") & _MASK or 1


def _spelled(value: Any) -> str:
    if isinstance(value, tuple | list):
        return f"({','.join(map(_spelled, value))})"
    if isinstance(value, frozenset | set):
        return f"{{{','.join(sorted(map(_spelled, value)))}}}"
    if isinstance(value, Mapping):
        return _spelled(frozenset(value.items()))
    if getattr(type(value), "__repr__", None) is object.__repr__:
        raise Unusable(f"gave a state of type {type(value).__name__}: expected text, numbers, or tuples of them")
    return repr(value)
