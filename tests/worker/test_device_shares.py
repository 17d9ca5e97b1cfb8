"""An engine's share of its accelerator is derived from all roles on it; what cannot fit is
refused before it starts.
"""

import pickle

import pytest

from siirl_dask.context import Device, DeviceKind
from siirl_dask.errors import PlanError
from siirl_dask.planner import Footprint, Remedy
from siirl_dask.worker.hardware.device_shares import share_devices

GB = 10**9
CPU, CUDA, _ = DeviceKind
ENGINE = Footprint(
    held={"weights": 15 * GB, "cache": GB},
    leaves=("weights", "cache"),
    fills="cache",
    least=GB,
    working={"x": GB},
)
POLICY = Footprint(held={"weights": 30 * GB}, working={"activations": 20 * GB})
FOOTPRINTS = {"rollout": ENGINE, "policy": POLICY}
BOTH = {"rollout": ["a", "b"], "policy": ["a", "b"]}


def cards(memory=80 * GB, *, shared=False):
    names = ("card", "card") if shared else ("one", "two")
    return {
        worker: Device(worker, CUDA, 0, name, 1 + shared, memory)
        for worker, name in zip("ab", names, strict=True)
    }


def test_an_engine_takes_what_its_workers_other_roles_leave():
    shared = share_devices(cards(), BOTH, FOOTPRINTS, None)
    for device in shared.values():
        # a process and the policy at rest, and the engine's own work
        left = 80 * GB * 0.97 - GB - 30 * GB - GB
        assert device.room == pytest.approx(left, rel=1e-6)
        assert device.fill == device.room - 15 * GB
    apart = share_devices(cards(), {"rollout": ["a"], "policy": ["b"]}, FOOTPRINTS, None)
    assert apart["a"].room == 72 * GB  # 0.9, as vLLM has it by itself
    assert (apart["b"].room, apart["b"].fill) == (0, 0)


def test_engines_on_one_accelerator_share_it_out():
    alone = {"rollout": ["a", "b"]}
    shared = share_devices(cards(shared=True), alone, FOOTPRINTS, None)
    rooms = [device.room for device in shared.values()]
    assert rooms[0] == rooms[1] <= 36 * GB
    beside = share_devices(
        cards(shared=True), {"rollout": ["a"], "policy": ["b"]}, FOOTPRINTS, None
    )
    assert beside["a"].room < 80 * GB * 0.97 - 2 * GB - 50 * GB, (
        "a policy of another worker computes at any time"
    )


def test_roles_that_cannot_fit_are_refused_with_what_to_change():
    remedies = (
        Remedy("trainer.gradient_checkpointing=true", Footprint(held={"weights": 20 * GB})),
    )
    heavy = {**FOOTPRINTS, "policy": Footprint(held={"weights": 70 * GB}, remedies=remedies)}
    with pytest.raises(PlanError, match=r"workers \['a'\] on one need .*80\.0 GB") as refused:
        share_devices(cards(), BOTH, heavy, None)
    assert "trainer.gradient_checkpointing=true (" in str(refused.value)
    with pytest.raises(PlanError, match=r"24\.0 GB"):
        share_devices(cards(24 * GB), BOTH, FOOTPRINTS, None)
    with pytest.raises(PlanError, match=r"24\.0 GB"):
        share_devices(cards(), BOTH, FOOTPRINTS, 24 * GB)


def test_a_larger_memory_in_the_configuration_lets_it_begin():
    begun = share_devices(cards(40 * GB), BOTH, FOOTPRINTS, 80 * GB)
    assert begun["a"].fill == GB, "the least that one row needs"


def test_what_the_driver_knows_of_roles_reaches_the_workers():
    assert pickle.loads(pickle.dumps({**FOOTPRINTS, "reward": Footprint()})) == {
        **FOOTPRINTS,
        "reward": Footprint(),
    }


def test_cpus_and_accelerators_of_unknown_memory_are_left_as_they_are():
    for devices in ({"a": Device("a"), "b": Device("b")}, cards(0)):
        assert share_devices(devices, BOTH, FOOTPRINTS, None) == devices
        assert [
            device.room for device in share_devices(devices, BOTH, FOOTPRINTS, None).values()
        ] == [0, 0]
    assert share_devices({"a": Device("a", CPU)}, BOTH, FOOTPRINTS, 8 * GB)["a"].room == 0


def test_a_role_of_which_nothing_is_known_does_not_keep_a_run_from_starting():
    assert share_devices(cards(), BOTH, {"policy": POLICY}, None)["a"].room == 0
