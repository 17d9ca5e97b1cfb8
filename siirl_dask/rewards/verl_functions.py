"""Takes a reward function written for verl's ``custom_reward_function``, unchanged.

rewards:
  function: siirl_dask.rewards:from_verl
  options: {function: "my_reward.py:compute_score"}
nodes:
  reward: {with: {columns: [data_source, extra_info]}}
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from siirl_dask.errors import ConfigError
from siirl_dask.rewards.numbers import number_of
from siirl_dask.rewards.signatures import signature_of
from siirl_dask.wording import function_with_place

VerlRewardFn = Callable[..., Any]
"""``(data_source, solution_str, ground_truth, extra_info, **kwargs) -> float | dict``, sync or
async; the key ``score`` of a dict trains."""
_COLUMNS = ("data_source", "extra_info")
_PASSED = (*_COLUMNS, "solution_str", "ground_truth")
_SCORE = "score"


def from_verl(
    prompt: Any,
    response: str,
    answer: Any,
    *,
    function: VerlRewardFn,
    arguments: Mapping[str, Any] | None = None,
    plain_response: str | None = None,
    turns: Sequence[Mapping[str, Any]] | None = None,
    **columns: Any,
) -> Any:
    """Return what verl's reward function gives one row, with ``score`` as ``reward``; awaitable
    where it is async.

    It is called with the response as ``solution_str``, the answer as ``ground_truth``, the columns
    ``data_source`` and ``extra_info``, and ``arguments``, verl's ``reward_kwargs``. As in verl the
    response is ``plain_response``, without any special token, and ``extra_info`` has two entries
    more: ``num_turns``, the prompt, the policy's ``turns`` and the answers between them (2 without
    ``turns``), and ``rollout_reward_scores``, empty. Numbers of a dict stay under their names; what
    is no number, as an extracted answer, is left out. ValueError for a dict without ``score``.
    """
    if plain_response is not None:
        response = plain_response
    extra_info = columns.get("extra_info")
    if extra_info is None:
        extra_info = {}
    if isinstance(extra_info, Mapping):
        added = {"num_turns": _number_of_turns(turns), "rollout_reward_scores": {}}
        extra_info = {**extra_info, **added}
    row = {
        "data_source": columns.get("data_source"),
        "solution_str": response,
        "ground_truth": answer,
        "extra_info": extra_info,
    }
    given = signature_of(function).taken(row)
    if arguments is not None:
        given |= arguments
    result = function(**given)
    if inspect.isawaitable(result):
        return _awaited(result)
    return _numbers(result)


def _number_of_turns(turns: Sequence[Mapping[str, Any]] | None) -> int:
    """Return the messages of an episode as verl counts them: the prompt, each turn of the policy's,
    and what answers each but the last.
    """
    if turns is None:
        return 2
    return 2 * len(turns)


async def _awaited(result: Awaitable[Any]) -> Any:
    return _numbers(await result)


def _numbers(result: Any) -> Any:
    if not isinstance(result, Mapping):
        return result
    if _SCORE not in result:
        raise ValueError(f"gave {dict(result)!r:.200}: expected the key {_SCORE!r}")
    numbers = {str(name): number_of(value) for name, value in result.items() if name != _SCORE}
    shown = {name: value for name, value in numbers.items() if not isinstance(value, str | None)}
    return {**shown, "reward": result[_SCORE]}


def check_verl_function(options: Mapping[str, Any]) -> frozenset[str]:
    """Return the columns that ``from_verl`` with these options needs besides prompt, response and
    answer. ConfigError for what cannot be called as verl calls it.
    """
    function = options.get("function")
    if not callable(function):
        raise ConfigError(
            f"siirl_dask.rewards:from_verl: function={function!r}: expected a function, as in "
            "rewards.options={function: 'my_reward.py:compute_score'}"
        )
    name = function_with_place(function)
    signature = signature_of(function)
    lacking = {"solution_str", "ground_truth"} - signature.names
    if lacking and not signature.takes_any:
        raise ConfigError(
            f"siirl_dask.rewards:from_verl: {name} does not take {', '.join(sorted(lacking))}: "
            "expected (data_source, solution_str, ground_truth, extra_info), as verl calls it"
        )
    foreign = signature.required - {*_PASSED}
    arguments = options.get("arguments")
    if arguments is not None:
        foreign -= set(arguments)
    if foreign:
        raise ConfigError(
            f"siirl_dask.rewards:from_verl: {name} needs {', '.join(sorted(foreign))}: give it in "
            "the option arguments"
        )
    return signature.required & {*_COLUMNS}
