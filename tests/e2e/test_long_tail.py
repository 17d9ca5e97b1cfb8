"""Workers that are done early take over what others have not begun: the same rows, computed
elsewhere.
"""

import re
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from siirl_dask.coordinator.layout.balance import balance
from tests.e2e.test_invariance import EXACT

DOCS = (Path(__file__).parents[2] / "docs" / "engines.md").read_text()

FOUR = ("cluster.workers=4", "cluster.placement={}", "data.batch_size=5", "algorithm.minibatches=1")
"""Five prompts for four workers: one has twice as many as the others."""


def test_rows_are_the_same_whoever_samples_them(train):
    given = (*FOUR, "rollout.max_rows=1")
    taking, keeping = (
        train(f"{on}", *given, f"rollout.work_stealing={on}") for on in ("true", "false")
    )
    for step in (1, 2, 3):
        assert (
            taking.table("rollouts", step)
            .select(EXACT)
            .equals(keeping.table("rollouts", step).select(EXACT))
        ), step
    moved, stayed = [
        sum(record["metrics"].get("rollout/taken_over", 0) for record in run.records())
        for run in (taking, keeping)
    ]
    assert moved > 0
    assert stayed == 0
    taken, kept = (
        [name for step in (1, 2, 3) for name in run.table("rollouts", step)["worker"].to_pylist()]
        for run in (taking, keeping)
    )
    assert max(map(kept.count, "0123")) == 3 * 8
    assert max(map(taken.count, "0123")) < 3 * 8


@pytest.fixture
def task(digits_task, tmp_path):
    """Twenty of the task's prompts, with limits of their own from 1 to 8."""
    rows = pq.read_table(digits_task.train).slice(0, 20)
    limits = pa.array([1 + (3 * row) % 8 for row in range(20)])
    pq.write_table(rows.append_column("max_tokens", limits), tmp_path / "train.parquet")
    return tmp_path / "train.parquet"


def with_expected_lengths(task, run):
    """The dataset that the docs' snippet makes."""
    (snippet,) = re.findall(r"```python\n(import duckdb\n.*?)```", DOCS, re.DOTALL)
    places = {
        "train.parquet": task,
        "runs/first": run.url,
        "train_expected.parquet": task.with_stem("expected"),
    }
    for name, place in places.items():
        assert f"'{name}" in snippet
        snippet = snippet.replace(f"'{name}", f"'{place}")
    exec(snippet, {})
    return task.with_stem("expected")


@pytest.mark.slow
def test_rows_are_the_same_wherever_their_expected_length_takes_them(train, task):
    """With the column of the docs: the second run knows how long the first one's responses were."""
    given = ("run.steps=2", "cluster.placement={}", "rollout.n=2", "rollout.work_stealing=false")
    first = train("first", *given, f"data.url={task}", "cluster.workers=1")
    url = with_expected_lengths(task, first)
    before, now = pq.read_table(task), pq.read_table(url)
    assert now.drop_columns("expected").to_pydict() == before.to_pydict()
    sampled = {
        prompt for step in (1, 2) for prompt in first.table("rollouts", step)["prompt"].to_pylist()
    }
    expected = dict(zip(now["prompt"].to_pylist(), now["expected"].to_pylist(), strict=True))
    assert {
        prompt for prompt, length in expected.items() if length == 256
    } == expected.keys() - sampled
    for workers in (1, 2, 4):
        given = (
            *given,
            f"data.url={url}",
            "rollout.expected_length_column=expected",
            f"cluster.workers={workers}",
        )
        shared = train(f"on-{workers}", *given)
        for step in (1, 2):
            rows = shared.table("rollouts", step)
            assert rows.select(EXACT).equals(first.table("rollouts", step).select(EXACT)), (
                workers,
                step,
            )
            lengths = [expected[prompt] for prompt in rows["prompt"].to_pylist()]
            assert fullest(rows["worker"].to_pylist(), lengths) <= 2 * most_of(
                lengths[::2], workers
            ), (workers, step)


def fullest(owners, lengths):
    """Return the tokens of the worker that has most to do."""
    return max(
        sum(length for worker, length in zip(owners, lengths, strict=True) if worker == w)
        for w in set(owners)
    )


def most_of(lengths, workers):
    """The same where prompts are shared as evenly as they are wherever rows are balanced."""
    costs = np.array(lengths)
    return max(fullest(balance(costs, workers).tolist(), lengths), 1.02 * costs.sum() / workers)
