"""Averages of a trace: bytes and seconds by node and edge; what was not recorded is not there."""

import pytest

from siirl_dask.observe.trace.step_averages import measure, usual_step
from siirl_dask.trace import START, Lane
from tests.observe.traces import span

SECOND = 10**9


def a_step(step, seconds=1.0, amount=None):
    at, took = step * 100 * SECOND, round(seconds * SECOND)
    more = {"step": step, "sequence": step}
    return [
        span("0", Lane.CONTROL, "train", at, took, what="task", **more),
        span("0", Lane.COMPUTE, "rollout", at, took, amount=amount, **more),
        span("0", Lane.WAIT, "rollout", at, took // 4, what="peers", **more),
        span("1", Lane.WAIT, "rollout->update", at, took, what="rows", **more),
        span(
            "1",
            Lane.TRANSFER,
            "rollout->update",
            at + took,
            SECOND // 2,
            what="receive",
            amount=600,
            **more,
        ),
        span(
            "0",
            Lane.TRANSFER,
            "rollout->update",
            at + took,
            SECOND // 4,
            what="publish",
            amount=900,
            **more,
        ),
        span(
            "0",
            Lane.TRANSFER,
            "rollout->update",
            at,
            9 * SECOND,
            what="send",
            amount=600,
            beside=True,
            **more,
        ),
        span(
            "1",
            Lane.COMPUTE,
            "update",
            at + took + SECOND // 2,
            SECOND,
            amount=amount and 2 * amount,
            **more,
        ),
    ]


def test_an_average_step_has_the_seconds_and_bytes_of_its_nodes_and_edges():
    found = measure([*a_step(2, 1.0), *a_step(3, 3.0)])
    assert found.steps == [2, 3]
    assert found.seconds == pytest.approx(3.5)
    assert found.nodes["rollout"].seconds == pytest.approx(1.5), (
        "waits for peers are no part of a node's time"
    )
    assert (found.nodes["update"].seconds, found.nodes["update"].worker) == (
        pytest.approx(1.0),
        "1",
    )
    edge = found.edges["rollout->update"]
    assert (edge.received, edge.moving, edge.waiting) == (
        600,
        pytest.approx(0.5),
        pytest.approx(2.0),
    )


def test_memory_is_the_most_of_any_step_and_unknown_where_it_was_not_recorded():
    found = measure([*a_step(2, amount=10**9), *a_step(3, amount=2 * 10**9)])
    assert (found.nodes["rollout"].memory, found.nodes["update"].memory) == (2 * 10**9, 4 * 10**9)
    assert found.memory == {"0": 2 * 10**9, "1": 4 * 10**9}
    without = measure(a_step(2))
    assert (without.nodes["rollout"].memory, without.memory) == (None, {})


def test_starts_and_validations_are_no_training_steps():
    started = span("0", Lane.COMPUTE, "role policy", 0, SECOND, phase=START)
    validated = span("0", Lane.COMPUTE, "rollout", 0, SECOND, phase="validation")
    assert measure([started, validated]) is None
    assert usual_step([started, validated]) == []
    assert measure([started, validated, *a_step(2)]).nodes["rollout"].seconds == pytest.approx(0.75)


def test_the_usual_step_is_the_one_of_median_length():
    spans = [*a_step(1, 30.0), *a_step(2, 1.0), *a_step(3, 1.2)]
    assert {one.step for one in usual_step(spans)} == {3}
    assert not [one for one in usual_step(spans) if one.beside]
