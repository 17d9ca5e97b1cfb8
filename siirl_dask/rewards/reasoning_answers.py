"""Scores answers to tasks of reasoning-gym (``siirl-dask data import reasoning_gym:chain_sum``) with
the package's own functions.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from siirl_dask.errors import ConfigError

_TUPLE = "reasoning_gym:tuple"
"""Name of the items of a tuple, which JSON does not have, and which some scores tell from lists."""


def reasoning_gym(prompt: object, response: str, answer: object, **extra: object) -> float:
    """Return the score, from 0 to 1, that reasoning-gym gives to what the response has in
    ``<answer>`` and ``</answer>``, or else to all of it.

    ``answer`` is the column ``entry`` of an imported dataset: ``data.answer=entry``. ConfigError
    for anything else.
    """
    dataset, entry = read_entry(answer)
    return float(dataset.score_answer(answer_in(response), entry))


def answer_in(response: str) -> str:
    """Return the answer that a response gives: the last one in tags, or the whole text."""
    from reasoning_gym.utils import extract_answer

    tagged = extract_answer(response)
    if tagged is None:
        return response.strip()
    return str(tagged)


def entry_text(dataset: str, options: Mapping[str, Any], entry: Mapping[str, Any]) -> str:
    """Return a task of ``dataset``, made with ``options``, as a JSON text."""
    plain = {"dataset": dataset, "options": dict(options), "entry": _tagged(entry)}
    return json.dumps(plain, sort_keys=True)


def read_entry(text: object) -> tuple[Any, Mapping[str, Any]]:
    """Return the dataset and the task that ``entry_text`` has written. ConfigError for anything
    else.
    """
    try:
        plain = json.loads(str(text))
        name = plain["dataset"]
        options = json.dumps(plain["options"], sort_keys=True)
        entry = _untagged(plain["entry"])
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{text!r:.100} is no task of reasoning_gym: expected the column 'entry' "
            "that `siirl-dask data import reasoning_gym:NAME` writes (data.answer=entry)"
        ) from error
    return _dataset(name, options), entry


@lru_cache(maxsize=256)
def _dataset(name: str, options: str) -> Any:
    from reasoning_gym.factory import create_dataset

    return create_dataset(name, seed=0, size=1, **json.loads(options))


def _tagged(value: Any) -> Any:
    match value:
        case tuple():
            return {_TUPLE: [_tagged(item) for item in value]}
        case list():
            return [_tagged(item) for item in value]
        case Mapping():
            return {key: _tagged(item) for key, item in value.items()}
    return value


def _untagged(value: Any) -> Any:
    match value:
        case {"reasoning_gym:tuple": items} if len(value) == 1:
            return tuple(_untagged(item) for item in items)
        case list():
            return [_untagged(item) for item in value]
        case Mapping():
            return {key: _untagged(item) for key, item in value.items()}
    return value
