"""The model of a step: its parts add up, its fit finds what its measurements were made of, and
it knows its layout.
"""

import math
from dataclasses import asdict, replace

import numpy as np
import pytest

from benchmarks.scale.demand import Demand, Link, seconds
from benchmarks.scale.devices import H100, MODELS, Baseline, Devices
from benchmarks.scale.lab_machine import (
    EngineCost,
    LabMachine,
    StepCost,
    TrainerCost,
    TransferCost,
    line_fit,
)
from benchmarks.scale.lab_run import LAYOUTS, Measured
from benchmarks.scale.model import Layout, StepRows, balanced, predict, prompts_once
from benchmarks.scale.parts import EMPTY, FAR, FAST, HELD_OUT, WORK, fit
from benchmarks.scale.validate import compare, mean_step
from benchmarks.scale.workload import draw_rows

WEIGHTS, HELD = 50_000_000, next(iter(HELD_OUT))
LINKS = {FAST: Link(math.inf, 2e-5), FAR: Link(math.inf, 0.06), HELD: Link(1e8, 0.01)}
MACHINE = LabMachine(
    weights=WEIGHTS,
    engine=EngineCost(0.001, 0.0003, 0.007, 0.0002),
    trainer=TrainerCost(0.005, 0.0003, 0.1, 0.0009),
    sums=TransferCost(byte=1e-9, trips=2.0),
    stream=TransferCost(byte=2e-9, trips=3.0),
    copy_byte=1e-9,
    steps={layout.name: StepCost(0.03, 12.0 if layout.workers > 1 else 0.0) for layout in LAYOUTS},
)
SMALL = replace(
    MACHINE,
    weights=0,
    engine=EngineCost(0.001, 0.0, 0.001, 0.0),
    trainer=TrainerCost(0.001, 0.0, 0.004, 0.0),
    sums=TransferCost(0.0, 0.0),
    stream=TransferCost(0.0, 0.0),
    copy_byte=0.0,
)
LONG_TAIL = StepRows(
    np.full(256, 100),
    np.random.default_rng(0).lognormal(6, 0.8, 256).astype(np.int64).clip(1, 4000),
    8,
)


def run_of(undisturbed, on_link, used=0.0, slowdowns=(3.0, 1.5, 2.0, 6.0)):
    """Make the record of a run whose steps were slowed down each in its own way."""
    steps = [undisturbed * slowdown + on_link for slowdown in slowdowns]
    return asdict(Measured(steps, list(slowdowns), used, [{} for _ in steps], 5.0))


def measurements():
    """Make what ``parts.measure`` would have found on a machine that is ``MACHINE``."""
    runs = {FAST: {}, FAR: {}}
    for link, found in runs.items():
        raw = LINKS[link]
        for layout in LAYOUTS:
            step = predict(layout, draw_rows(EMPTY, np.random.default_rng(0)), SMALL)
            waiting = (
                sum(part.trips for part in step.values()) * raw.round_trip if link == FAR else 0.0
            )
            found[f"training {EMPTY.name} {layout.name}"] = run_of(
                sum(p.compute for p in step.values()), waiting
            )
        for layout in (LAYOUTS[0], LAYOUTS[2]):
            byte = MACHINE.copy_byte + (MACHINE.stream.byte if layout.workers > 1 else 0.0)
            moved = MACHINE.stream.trips * raw.round_trip if link == FAR else 0.0
            found[f"hand_over {EMPTY.name} {layout.name}"] = run_of(0.02, 0.0, used=0.03)
            found[f"hand_over {WORK.name} {layout.name}"] = run_of(
                0.02 + byte * WEIGHTS, moved, used=0.03 + byte * WEIGHTS
            )
    used = MACHINE.sums.byte * WEIGHTS
    far = used + MACHINE.sums.trips * LINKS[FAR].round_trip
    return {
        "weights": WEIGHTS,
        "compute": {
            size.name: {"engine": asdict(machine.engine), "trainer": asdict(machine.trainer)}
            for size, machine in ((EMPTY, SMALL), (WORK, MACHINE))
        },
        "links": {name: asdict(link) for name, link in LINKS.items()},
        "sums": {FAST: {"seconds": 0.1, "used": used}, FAR: {"seconds": far, "used": used}},
        "runs": runs,
    }


def test_the_fit_finds_the_machine_that_the_measurements_were_made_of():
    found = fit(measurements())
    assert found.sums.byte == pytest.approx(MACHINE.sums.byte)
    assert found.sums.trips == pytest.approx(MACHINE.sums.trips)
    assert found.stream.byte == pytest.approx(MACHINE.stream.byte)
    assert found.stream.trips == pytest.approx(MACHINE.stream.trips, abs=0.1)
    assert found.copy_byte == pytest.approx(MACHINE.copy_byte)
    for layout in LAYOUTS:
        assert found.steps[layout.name].compute == pytest.approx(0.03)
        assert found.steps[layout.name].trips == pytest.approx(
            MACHINE.steps[layout.name].trips, abs=0.05
        )


def test_a_run_that_went_as_predicted_has_no_error_however_busy_the_machine_was():
    runs = []
    for layout in LAYOUTS:
        step = mean_step(MACHINE, layout)
        computing = sum(part.compute for part in step.values())
        run = run_of(computing, seconds(step, LINKS[HELD]) - computing)
        run["nodes"] = [
            {"update": step["update"].seconds(LINKS[HELD], slowdown)}
            for slowdown in run["slowdowns"]
        ]
        runs.append({"link": HELD, "layout": layout.name, "run": run})
    for each in compare(MACHINE, LINKS, runs):
        assert each.error == pytest.approx(0, abs=1e-9)
        assert each.slowdown == 1.75
        assert each.parts["update"][0] == pytest.approx(each.parts["update"][1])
        assert each.undisturbed < each.measured


def test_coefficients_are_found_again_and_none_is_negative():
    columns = [[1.0] * 4, [1.0, 2.0, 3.0, 5.0], [4.0, 1.0, 9.0, 2.0]]
    seconds = [2 + 3 * number for number in columns[1]]
    assert line_fit(columns, seconds) == pytest.approx([2, 3, 0], abs=1e-6)
    assert min(line_fit(columns, [10.0, 6.0, 4.0, 1.0])) >= 0


def test_a_link_with_delay_costs_round_trips_and_a_slow_one_bytes():
    part = Demand(compute=1, wire=100, trips=3)
    assert part.seconds(Link(rate=50, round_trip=0.5), slowdown=2) == 2 + 2 + 1.5


def test_a_prompt_counts_once_on_each_worker_that_has_samples_of_it():
    rows = StepRows(np.array([5, 5, 5, 7, 7, 7]), np.ones(6, np.int64), 3)
    assert prompts_once(rows, np.array([0, 1, 0, 1, 1, 1])).tolist() == [5, 5, 0, 7, 0, 0]


@pytest.mark.parametrize("minibatches", [1, 4])
def test_learners_have_equal_shares_of_tokens_by_the_code_that_runs(minibatches):
    layout = Layout("", 4, 8, together=False, minibatches=minibatches)
    owners = balanced(layout, LONG_TAIL, 0, np.repeat(np.arange(minibatches), 256 // minibatches))
    shares = np.bincount(owners, LONG_TAIL.tokens, 8)
    assert shares.max() < 1.02 * shares.mean()


def test_an_engine_takes_longer_when_its_cache_has_no_room_for_all_rows():
    shape = MODELS["7B"]
    narrow = replace(shape, cache_bytes=shape.cache_bytes * 100)
    layout = Layout("", 1, 1, together=True)
    machines = [Devices(each, 4100, 100) for each in (shape, narrow)]
    wide, tight = (
        predict(layout, LONG_TAIL, each)["generate"].seconds(H100.network) for each in machines
    )
    assert tight > 2 * wide


@pytest.mark.parametrize(
    ("baseline", "part"),
    [
        (Baseline(driver_rate=0.5e9), "fixed"),
        (Baseline(padded=True), "update"),
        (Baseline(in_order=True), "update"),
    ],
)
def test_each_thing_that_a_baseline_does_otherwise_costs_time_in_its_own_part(baseline, part):
    layout = Layout("", 8, 8, together=True, minibatches=2)
    ours, other = (
        predict(layout, LONG_TAIL, Devices(MODELS["7B"], 4100, 100, each))
        for each in (Baseline(), baseline)
    )
    assert other[part].seconds(H100.network) > ours[part].seconds(H100.network)
    assert other["generate"] == ours["generate"]
