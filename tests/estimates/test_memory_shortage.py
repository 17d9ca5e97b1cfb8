"""The memory that a plan counts for all workers is held against the machine's, and a cure that is
named is one.
"""

import pytest

from siirl_dask.config import ClusterConfig, Config, DataConfig, RolloutConfig, TrainerConfig
from siirl_dask.devices import machine_memory
from siirl_dask.devices.machine_memory import MachineMemory
from siirl_dask.estimates import memory_shortage
from siirl_dask.estimates.memory import WorkerMemory
from siirl_dask.estimates.memory_shortage import find_shortage

GB = 10**9


def worker(names=("0", "1"), *, roles=2 * GB, computing=0, tables=0):
    return WorkerMemory(
        workers=tuple(names),
        roles={"policy": roles},
        tables=tables,
        largest="update of train",
        moving=0,
        unknown=(),
        computing=computing,
    )


@pytest.fixture
def machine(monkeypatch):
    def has(total, limit=None):
        found = MachineMemory(total * GB, None if limit is None else limit * GB)
        monkeypatch.setattr(memory_shortage, "machine_memory", lambda: found)

    return has


def config(**cluster):
    return Config(
        cluster=ClusterConfig(**cluster),
        trainer=TrainerConfig(max_tokens_per_micro_batch=16384),
        data=DataConfig(url="x", max_prompt_length=512),
        rollout=RolloutConfig(max_response_length=512),
    )


def test_activations_that_are_too_large_name_a_number_of_tokens_that_fits(machine):
    machine(23)
    short = find_shortage(config(), [worker(computing=23 * GB)])
    assert "50.9 GB" in short.text
    assert "23.0 GB" in short.text
    assert short.cure == "set trainer.max_tokens_per_micro_batch=4096 (it is 16384)"
    assert not short.is_certain
    assert find_shortage(config(), [worker(computing=23 * GB * 4096 // 16384)]) is None


def test_a_container_counts_with_what_it_may_use_and_models_that_do_not_fit_are_certain(machine):
    machine(64, limit=4)
    short = find_shortage(config(), [worker()])
    assert "its container may use 4.0 GB" in short.text
    assert "cluster.workers" in short.cure
    assert short.is_certain


def test_tables_that_are_too_large_name_their_keys(machine):
    machine(23)
    short = find_shortage(config(), [worker(("0",), tables=30 * GB)])
    assert "data.batch_size" in short.cure


@pytest.mark.parametrize("elsewhere", [{"address": "tcp://a:1"}, {"spec": "slurm.yaml"}])
def test_workers_that_are_started_elsewhere_are_not_held_against_this_machine(machine, elsewhere):
    machine(1)
    assert find_shortage(config(**elsewhere), [worker()]) is None


@pytest.mark.parametrize(
    ("own", "limits", "expected"),
    [
        ("0::/a/b\n", {"a/memory.max": "3000"}, [3000]),
        ("0::/a/b\n", {"a/b/memory.max": "max\n", "memory.max": "5000\n"}, [5000]),
        ("0::/../x\n", {"memory.max": "max"}, []),
        ("4:memory:/x\n", {"memory/memory.limit_in_bytes": "7000"}, [7000]),
    ],
)
def test_the_limits_of_all_control_groups_around_a_process_count(tmp_path, own, limits, expected):
    for name, text in limits.items():
        path = tmp_path / "groups" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "own").write_text(own)
    assert list(machine_memory._limits(tmp_path / "groups", tmp_path / "own")) == expected
