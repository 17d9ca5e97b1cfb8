"""Several rewards for one row: their weighted sum, or the one of its source."""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from numbers import Real
from typing import Any

from siirl_dask.errors import ConfigError
from siirl_dask.rewards.numbers import number_of
from siirl_dask.rewards.signatures import named_columns, signature_of
from siirl_dask.wording import value_text


def weighted_sum(
    prompt: object,
    response: str,
    answer: object,
    *,
    rewards: Mapping[str, Callable[..., Any]],
    weights: Mapping[str, float],
    prompt_text: str | None = None,
    plain_response: str | None = None,
    turns: Sequence[Any] | None = None,
    **extra: object,
) -> dict[str, float] | Awaitable[dict[str, float]]:
    """Return several rewards by name, and as ``reward`` the sum of each times its weight; awaitable
    where one of them is async.

    Those that have an argument ``prompt_text``, ``plain_response`` or ``turns`` get it, and each
    gets what it takes of ``extra``.

    The ``reward`` of a function that returns a dict counts in the sum; its other entries are named
    ``NAME/PART``. ValueError when rewards and weights have different names, or a reward is called
    ``reward``; TypeError, with its name, for a reward that gives no number.
    """
    if rewards.keys() != weights.keys() or "reward" in rewards:
        raise ValueError(
            f"rewards {[*rewards]}, weights {[*weights]}: expected the same names, none of them "
            "'reward'"
        )
    arguments = {"prompt": prompt, "response": response, "answer": answer, **extra}
    named = {"prompt_text": prompt_text, "plain_response": plain_response, "turns": turns}
    results = [_call(reward, arguments, named) for reward in rewards.values()]
    if any(inspect.isawaitable(result) for result in results):
        return _awaited(weights, results)
    return _total(weights, dict(zip(rewards, results, strict=True)))


def by_source(
    prompt: object,
    response: str,
    answer: object,
    data_source: str,
    *,
    rewards: Mapping[str, Callable[..., Any]],
    prompt_text: str | None = None,
    plain_response: str | None = None,
    turns: Sequence[Any] | None = None,
    **extra: object,
) -> Any:
    """Return what the reward of the row's ``data_source`` gives, as verl and siiRL choose one;
    awaitable where that is async.

    ValueError for a source that ``rewards`` does not have.
    """
    reward = rewards.get(data_source)
    if reward is None:
        raise ValueError(f"data_source={data_source!r}: expected one of {', '.join(rewards)}")
    arguments = {"prompt": prompt, "response": response, "answer": answer, **extra}
    named = {"prompt_text": prompt_text, "plain_response": plain_response, "turns": turns}
    return _call(reward, arguments, named)


def _call(
    reward: Callable[..., Any], arguments: Mapping[str, Any], named: Mapping[str, Any]
) -> Any:
    """Call a reward with those of ``arguments`` that it takes: others are for other rewards. Of
    the columns in ``named`` it gets those that it has an argument for.
    """
    signature = signature_of(reward)
    taken = signature.taken(arguments)
    for name in named_columns(reward):
        if named[name] is not None or name in signature.required:
            taken[name] = named[name]
    return reward(**taken)


async def _awaited(weights: Mapping[str, float], results: Sequence[Any]) -> dict[str, float]:
    values = await all_of(results)
    return _total(weights, dict(zip(weights, values, strict=True)))


async def all_of(results: Sequence[Any]) -> list[Any]:
    """Return results in their order, those that are awaitable as what they give; these are awaited
    together.
    """

    async def value_of(result: Any) -> Any:
        if inspect.isawaitable(result):
            return await result
        return result

    return await asyncio.gather(*(value_of(result) for result in results))


def _total(weights: Mapping[str, float], results: Mapping[str, Any]) -> dict[str, float]:
    parts: dict[str, float] = {}
    for name, result in results.items():
        entries = result
        if not isinstance(result, Mapping):
            entries = {"reward": result}
        if "reward" not in entries:
            raise ValueError(f"{name} gave {value_text(dict(entries))}: expected the key 'reward'")
        for part, value in entries.items():
            label = name if part == "reward" else f"{name}/{part}"
            number = number_of(value)
            if not isinstance(number, Real):
                raise TypeError(f"{label} gave {value_text(value)}: expected a number")
            parts[label] = float(number)
    return {"reward": sum(weight * parts[name] for name, weight in weights.items()), **parts}


def check_weighted_sum(options: Mapping[str, Any]) -> Mapping[str, Callable[..., Any]]:
    """Return the rewards of a weighted sum by name. ConfigError for options that it cannot add."""
    rewards = options.get("rewards")
    weights = options.get("weights")
    if not isinstance(rewards, Mapping) or not isinstance(weights, Mapping) or not rewards:
        raise ConfigError(
            "siirl_dask.rewards:weighted_sum: its options are rewards and weights, by the same "
            "names: rewards.options={rewards: {right: 'my_rewards.py:right'}, weights: {right: 1.0}}"
        )
    if rewards.keys() != weights.keys() or "reward" in rewards:
        raise ConfigError(
            f"siirl_dask.rewards:weighted_sum: rewards {[*rewards]}, weights {[*weights]}: expected "
            "the same names, none of them 'reward'"
        )
    check_weights("weighted_sum", weights.values())
    return rewards


def check_by_source(options: Mapping[str, Any]) -> Mapping[str, Callable[..., Any]]:
    """Return the rewards of ``by_source``. ConfigError for options of another form."""
    rewards = options.get("rewards")
    if not isinstance(rewards, Mapping) or not rewards:
        raise ConfigError(
            "siirl_dask.rewards:by_source: its option is a reward for each data_source: "
            "rewards.options={rewards: {openai/gsm8k: 'siirl_dask.rewards:gsm8k'}}"
        )
    return rewards


def check_weights(function: str, weights: Any) -> None:
    """Raise ConfigError for a weight, an option of the reward ``function``, that is no finite
    number.
    """
    for weight in weights:
        if type(weight) not in (int, float) or not abs(weight) < math.inf:
            raise ConfigError(
                f"siirl_dask.rewards:{function}: the weight {weight!r:.100} is no finite number"
            )
