import pytest

from siirl_dask.algorithms import RoleBaselines, build_role_baselines
from siirl_dask.context import Device, Rank
from siirl_dask.errors import ConfigError


def test_a_baseline_is_subtracted_and_then_moves():
    held = RoleBaselines(decay=0.5)
    assert held.advantages([1.0, -1.0], ["first", "second"]) == [1.0, -1.0]
    held.update([("first", 1.0), ("second", -1.0), ("first", 1.0)])
    assert held.baselines == {"first": 0.75, "second": -0.5}
    assert held.advantages([1.0, 1.0, 1.0], ["first", "second", "third"]) == [0.25, 1.5, 1.0]


def test_the_default_decay_is_that_of_spiral():
    held = build_role_baselines(Device("a"), Rank())
    held.update([("x", 1.0), ("x", 1.0)])
    assert held.baselines["x"] == pytest.approx(0.05 + 0.95 * 0.05)


def test_baselines_resume_from_their_state():
    first, second = RoleBaselines(), RoleBaselines()
    first.update([("x", 1.0), ("y", -0.3)])
    second.load_state(first.state())
    for held in (first, second):
        held.update([("x", 0.7)])
    assert first.baselines == second.baselines


def test_a_state_before_the_first_reward_is_a_state():
    # an empty one would be taken for an object without any, and never be saved
    assert RoleBaselines().state()


def test_a_reward_that_is_not_finite_spoils_no_baseline():
    held = RoleBaselines()
    held.update([("x", float("nan")), ("x", float("inf"))])
    assert held.baselines == {}


@pytest.mark.parametrize("decay", [-0.1, 1.0, float("nan")])
def test_an_impossible_decay_is_refused(decay):
    with pytest.raises(ConfigError, match="expected 0 to below 1"):
        RoleBaselines(decay)


def test_a_state_that_is_none_is_refused():
    with pytest.raises(ValueError, match="expected finite numbers"):
        RoleBaselines().load_state({"baselines": {"x": float("nan")}})
