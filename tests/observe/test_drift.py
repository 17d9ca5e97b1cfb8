"""Drift is said once, in a line; noise around a level is never taken for it."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from siirl_dask.observe.drift import BLOCK, BLOCKS, ENTROPY, FIRST, KL, LAST, MEMORY, WARM_UP, Drift

STEPS = 120
DISAGREES = "do not compute the same model"
LEVELS = {
    "seconds": 2.0,
    MEMORY: 3e9,
    ENTROPY: 0.8,
    KL: 2e-3,
    "reward/format": 0.4,
    "reward/mean": 0.5,
    "policy/skipped_steps": 0.0,
}
SAYS = {
    "seconds": "times as long as at first",
    MEMORY: "grows with each step",
    ENTROPY: "entropy has fallen from 0.",
    KL: "sampler and trainer come apart",
    "reward/format": "reward/format has gone from 0.",
}


def record(step, values):
    metrics = {name: value for name, value in values.items() if name != "seconds"}
    return {"step": step, "phase": "train", "seconds": values["seconds"], "metrics": metrics}


def said(drift, factors, steps=range(1, STEPS + 1), noise=None):
    """Return what is said at each step, where the level of ``name`` is multiplied by
    ``factors[name](step)``.
    """
    noise, lines = noise or (lambda: 1.0), {}
    for step in steps:
        values = {
            name: level * noise() * factors.get(name, lambda step: 1.0)(step)
            for name, level in LEVELS.items()
        }
        if new := drift.note(record(step, values)):
            lines[step] = new
    return lines


def of_noise(seed, size):
    generator = random.Random(seed)
    return lambda: 1 + generator.uniform(-size, size)


@settings(max_examples=40)
@given(st.integers(0, 2**32), st.floats(0, 0.2))
def test_nothing_is_said_of_noise_around_a_level(seed, size):
    assert said(Drift(), {}, noise=of_noise(seed, size)) == {}


SHIFTS = {
    "seconds": lambda step: 1.0 if step < 40 else 2.5,
    ENTROPY: lambda step: 1.0 if step < 40 else 0.03,
    KL: lambda step: 1.0 if step < 40 else 6.0,
    "reward/format": lambda step: 1.0 if step < 40 else 0.0,
    MEMORY: lambda step: 1.0 if step < 40 else 1 + 0.05 * (step - 40),
}


@settings(max_examples=40)
@given(st.sampled_from(list(SHIFTS)), st.integers(0, 2**32), st.floats(0, 0.2))
def test_a_shift_is_said_once_and_soon(name, seed, size):
    noise = of_noise(seed, size / 20 if name == MEMORY else size)
    ((step, (line,)),) = said(Drift(), {name: SHIFTS[name]}, noise=noise).items()
    assert SAYS[name] in line
    assert 40 <= step <= (40 + (BLOCKS + 1) * BLOCK if name == MEMORY else 40 + LAST)
    assert "\n" not in line


def test_the_first_steps_are_no_level_and_a_slow_start_is_no_drift():
    slow_start = {"seconds": lambda step: 20.0 if step <= WARM_UP else 1.0}
    assert said(Drift(), slow_start) == {}
    early = {"seconds": lambda step: 1.0 if step <= WARM_UP + FIRST else 3.0}
    assert min(said(Drift(), early)) == WARM_UP + FIRST + LAST


def test_other_workers_have_levels_of_their_own_and_nothing_is_said_twice():
    drift = Drift()
    said(drift, SHIFTS)
    assert len(drift.said) == len(SHIFTS)
    drift.begin()
    assert said(drift, {"seconds": lambda step: 3.0}, range(STEPS, 2 * STEPS)) == {}
    drift.begin()
    assert said(drift, SHIFTS, range(1, STEPS)) == {}
    assert len(drift.said) == len(SHIFTS)


def test_steps_that_were_left_out_are_said_with_where_their_rows_are():
    drift = Drift()
    lines = said(drift, {}, range(1, 5))
    assert lines == {}
    values = LEVELS | {"policy/skipped_steps": 1.0}
    (line,) = drift.note(record(5, values))
    assert line.startswith("step 5: 1 of the optimizer steps left out")
    assert "nonfinite-NODE/step=000005" in line
    assert drift.note(record(6, values)) == []


@pytest.mark.parametrize(
    "values", [{}, {ENTROPY: None, "reward/format": None}, {ENTROPY: 0.0, "reward/format": 0.0}]
)
def test_a_run_without_these_numbers_is_followed_all_the_same(values):
    drift = Drift()
    for step in range(STEPS):
        assert drift.note(record(step, {"seconds": 1.0, **values})) == []


@pytest.mark.parametrize(("kl", "is_said"), [(0.05, False), (0.1, True), (5.0, True)])
def test_an_engine_that_computes_another_model_than_the_trainer_is_named_at_the_first_step(
    kl, is_said
):
    drift = Drift()
    lines = [
        line for step in (1, 2, 3) for line in drift.note(record(step, {"seconds": 1.0, KL: kl}))
    ]
    assert [DISAGREES in line for line in lines] == [True] * is_said


def test_agents_are_named_whose_engine_computes_another_model():
    (line,) = Drift().note(record(1, {"seconds": 1.0, f"solver/{KL}": 0.5}))
    assert line.startswith("solver: ")
    assert DISAGREES in line
