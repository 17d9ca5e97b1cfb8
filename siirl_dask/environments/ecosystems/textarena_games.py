"""Games of TextArena: ``textarena:GuessTheNumber-v0``, and ``textarena:Nim-v0?players=2`` in which
one policy plays all sides.

What a player sees are the game's messages since its last turn, without its own words. The package
draws from Python's global random numbers: each game has a state of its own for these, so that it
depends on its seed alone.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from textwrap import shorten
from threading import Lock
from typing import Any

import numpy as np
import textarena

from siirl_dask.environments.ecosystems.observations import observed, opening_after, seed_of
from siirl_dask.environments.protocol import Opening, Step
from siirl_dask.errors import PlanError, counted
from siirl_dask.planner.spec.ecosystems import EcosystemName, unknown_id

ROWS = 500
_PLAYERS = "players"
_LONGEST_REASON = 300  # characters
_lock = Lock()
"""Held while a game draws from the global random numbers."""


def environment(name: EcosystemName) -> Callable[..., Any]:
    """Return ``TextArenaGame`` with the options of ``name``. PlanError for a game that TextArena
    does not have, or does not begin with these options and players.
    """
    options = dict(name.options)
    players = options.pop(_PLAYERS, 1)
    _begun(name, options, players)
    return partial(TextArenaGame, id=name.id, players=players, options=options)


def rows(name: EcosystemName, seed: int) -> Iterator[Mapping[str, Any]]:
    """Yield rows with seeds one after the other. Their prompt names the game, which begins with
    its rules.
    """
    options = dict(name.options)
    _begun(name, options, options.pop(_PLAYERS, 1))
    while True:
        yield {"prompt": f"You play {name.id}.\n", "seed": seed}
        seed += 1


def _begun(name: EcosystemName, options: Mapping[str, Any], players: object) -> None:
    """Begin a game, for its errors."""
    registry = textarena.envs.registration.ENV_REGISTRY
    if name.id not in registry:
        raise unknown_id(name, registry)
    if not isinstance(players, int) or players < 1:
        raise PlanError(
            f"{name.spelled!r}: {_PLAYERS}={players!r}: expected a number of at least 1"
        )
    try:
        TextArenaGame(id=name.id, players=players, options=options).reset({}, 0)
    except Exception as error:  # a game raises what it likes
        reason = shorten(f"{type(error).__name__}: {error}", _LONGEST_REASON)
        cure = ""
        if "number of players" in reason:
            cure = (
                f"; {name.package}:{name.id}?{_PLAYERS}=2 is for two, with "
                "environments.agents=[player_0, player_1]"
            )
        raise PlanError(
            f"{name.spelled!r}: textarena does not begin it with {counted(players, 'player')}: "
            f"{reason}{cure}"
        ) from error


class TextArenaGame:
    """A game of TextArena, in the protocol of this package. Of several players each is an agent,
    ``player_0`` and so on.
    """

    def __init__(
        self,
        *,
        id: str,
        players: int = 1,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        """``options`` are those of ``textarena.make``."""
        self._game = textarena.make(id, **({} if options is None else options))
        self._players = players
        self._random: tuple[Any, Any] | None = None
        self._row: Mapping[str, Any] = {}
        self._begun: set[int] = set()

    def reset(self, row: Mapping[str, Any], seed: int) -> Opening:
        """Return the row's prompt with what the first player sees after it."""
        self._row = row
        own = seed_of(row, seed)
        with self._own_random(own):
            self._game.reset(num_players=self._players, seed=own)
            player, text = self._seen()
        self._begun = {player}
        opening = opening_after(row, text)
        return Opening(prompt=opening.prompt, agent=self._agent(player))

    def step(self, text: str) -> Step:
        """Make the move of the player whose turn it is. Rewards come with the end."""
        with self._own_random():
            done, _ = self._game.step(action=text)
            if done:
                rewards, _ = self._game.close()
                return Step(reward=self._rewards(rewards), done=True)
            player, seen = self._seen()
        if player not in self._begun:
            self._begun.add(player)
            begins = opening_after(self._row, seen)
            return Step(history=begins.prompt, agent=self._agent(player))
        return Step(observation=observed(self._row, seen), agent=self._agent(player))

    def _agent(self, player: int) -> str | None:
        if self._players == 1:
            return None
        return f"player_{player}"

    def _rewards(self, rewards: Mapping[int, float] | None) -> float | Mapping[str, float]:
        if rewards is None:
            rewards = {}
        if self._players == 1:
            return float(rewards.get(0, 0.0))
        return {f"player_{player}": float(reward) for player, reward in rewards.items()}

    def _seen(self) -> tuple[int, str]:
        """Return whose turn it is, and the messages since that player's last turn."""
        game = self._game
        while isinstance(game, textarena.Wrapper):
            # an observation's wrapper tells the whole game again each turn
            game = game.env
        player, messages = game.get_observation()
        own = textarena.ObservationType.PLAYER_ACTION
        names = game.state.role_mapping
        lines = [
            f"[{names.get(sender, f'Player {sender}')}] {message}"
            for sender, message, kind in messages
            if not (sender == player and kind is own)
        ]
        return int(player), "\n".join(lines)

    @contextmanager
    def _own_random(self, seed: int | None = None) -> Iterator[None]:
        """Have the global random numbers be this game's own inside the ``with`` block, begun with
        ``seed`` where it is given.
        """
        with _lock:
            before = (random.getstate(), np.random.get_state())
            try:
                if seed is not None:
                    random.seed(seed)
                    np.random.seed(seed)
                elif self._random is not None:
                    random.setstate(self._random[0])
                    np.random.set_state(self._random[1])
                yield
            finally:
                self._random = (random.getstate(), np.random.get_state())
                random.setstate(before[0])
                np.random.set_state(before[1])
