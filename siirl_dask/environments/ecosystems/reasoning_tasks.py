"""Tasks of reasoning-gym: ``reasoning_gym:chain_sum?max_terms=3``, each made of a seed and scored
by the package.

The answer is what the response has in ``<answer>`` and ``</answer>``, or else all of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from reasoning_gym.factory import DATASETS, create_dataset

from siirl_dask.environments.ecosystems.observations import opening_after, seed_of
from siirl_dask.environments.protocol import Opening, Step
from siirl_dask.errors import PlanError
from siirl_dask.planner.spec.ecosystems import EcosystemName, unknown_id
from siirl_dask.rewards.reasoning_answers import answer_in, entry_text, read_entry

ROWS = 500
"""Tasks of a dataset of reasoning-gym; those after them have the seed that follows."""
_ENTRY = "entry"


def environment(name: EcosystemName) -> Callable[..., Any]:
    """Return ``ReasoningTask`` with the options of ``name``. PlanError for a dataset that
    reasoning-gym does not have, or that does not take the options.
    """
    _dataset(name, seed=0, size=1)
    return partial(ReasoningTask, id=name.id, options=dict(name.options))


def rows(name: EcosystemName, seed: int) -> Iterator[Mapping[str, Any]]:
    """Yield the tasks of the dataset of ``seed``, and then those of the seeds after it: the
    question, the answer, and ``entry``, which ``siirl_dask.rewards:reasoning_gym`` scores by.
    """
    while True:
        dataset = _dataset(name, seed=seed, size=ROWS)
        for number in range(ROWS):
            entry = dataset[number]
            yield {
                "prompt": entry["question"],
                "answer": "" if entry["answer"] is None else str(entry["answer"]),
                _ENTRY: entry_text(name.id, name.options, entry),
            }
        seed += 1


def _dataset(name: EcosystemName, *, seed: int, size: int) -> Any:
    if name.id not in DATASETS:
        raise unknown_id(name, DATASETS)
    try:
        return create_dataset(name.id, seed=seed, size=size, **name.options)
    except Exception as error:  # a dataset raises what it likes over its options
        raise PlanError(
            f"{name.spelled!r}: reasoning_gym does not make it: {type(error).__name__}: {error}"
        ) from error


class ReasoningTask:
    """A task, which is that of the row where ``environments.columns`` has ``entry``, and is else
    made of the episode's seed. The first turn is its answer.
    """

    def __init__(self, *, id: str, options: Mapping[str, Any] | None = None) -> None:
        """``options`` are those of the dataset."""
        self._id = id
        self._options = {}
        if options is not None:
            self._options = dict(options)
        self._dataset: Any = None
        self._entry: Mapping[str, Any] = {}

    def reset(self, row: Mapping[str, Any], seed: int) -> Opening:
        """Return the row's prompt, which asks the question of its entry, or else a new question
        after it.
        """
        if _ENTRY in row:
            self._dataset, self._entry = read_entry(row[_ENTRY])
            return Opening()
        own = seed_of(row, seed)
        self._dataset = create_dataset(self._id, seed=own, size=1, **self._options)
        self._entry = self._dataset[0]
        return opening_after(row, str(self._entry["question"]))

    def step(self, text: str) -> Step:
        """Return the package's score of the answer."""
        reward = self._dataset.score_answer(answer_in(text), self._entry)
        return Step(reward=float(reward), done=True)
