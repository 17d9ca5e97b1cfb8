import pytest
from hypothesis import given
from hypothesis import strategies as st

from siirl_dask.algorithms import KLController, build_kl_controller
from siirl_dask.context import Device, Rank
from siirl_dask.errors import ConfigError, TrainingError


@pytest.mark.parametrize(
    ("kl", "expected"),
    [
        (0.1, 0.1),
        (0.09, 0.099),
        (0.11, 0.101),
        (10.0, 0.102),
        (0.0, 0.098),
        (-3.0, 0.098),
    ],  # error * .1 of horizon
)
def test_hand_checked_updates(kl, expected):
    controller = KLController(0.1, target=0.1, horizon=10000)
    controller.update(kl, samples=1000)
    assert controller.coefficient == pytest.approx(expected)


def test_without_a_target_the_coefficient_is_fixed():
    controller = KLController(0.1)
    controller.update(100.0, samples=10**9)
    assert controller.coefficient == 0.1


@given(kls=st.lists(st.floats(-100, 100), max_size=20), samples=st.integers(0, 49999))
def test_the_coefficient_stays_positive_and_finite(kls, samples):
    controller = KLController(0.1, target=0.1)
    for kl in kls:
        controller.update(kl, samples)
    assert 0 < controller.coefficient < float("inf")


@pytest.mark.parametrize("target", [None, 0.1])
@pytest.mark.parametrize("kl", [float("nan"), float("inf"), -float("inf")])
def test_a_nonfinite_kl_is_refused_and_changes_nothing(kl, target):
    controller = KLController(0.1, target=target)
    with pytest.raises(TrainingError, match="expected a finite number"):
        controller.update(kl, samples=8)
    assert controller.coefficient == 0.1


def test_a_controller_resumes_from_its_state():
    first, second = (KLController(0.1, target=0.1) for _ in range(2))
    first.update(0.3, samples=5000)
    second.load_state(first.state())
    for controller in (first, second):
        controller.update(0.05, samples=5000)
    assert first.coefficient == second.coefficient != 0.1


@pytest.mark.parametrize(
    "options",
    [
        {"coefficient": -0.1},
        {"coefficient": float("nan")},
        {"target": 0.0},
        {"target": float("nan")},
        {"horizon": 0},
    ],
)
def test_impossible_settings_are_refused(options):
    with pytest.raises(ConfigError, match="expected"):
        KLController(**{"coefficient": 0.1} | options)


def test_a_horizon_that_could_turn_the_sign_is_refused():
    controller = KLController(0.1, target=0.1, horizon=100)
    with pytest.raises(ConfigError, match=r"expected a horizon above 100,"):
        controller.update(0.1, samples=500)


def test_a_role_can_build_a_controller():
    controller = build_kl_controller(
        Device("a"), Rank(), coefficient=0.1, target=0.1, horizon=1000.0
    )
    controller.update(1.0, samples=100)
    assert controller.coefficient == pytest.approx(0.102)
