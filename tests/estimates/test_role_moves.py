"""Estimated seconds for which roles' memory moves in a step: what sleeps, wakes, parks and is
reloaded, and where.
"""

from __future__ import annotations

from collections import Counter
from functools import cache

import pytest

from siirl_dask.cli import main
from siirl_dask.config.file import load_config_file, shipped
from siirl_dask.driver.phases import dags, plan_phases, worker_names
from siirl_dask.estimates.computing_seconds import StepTokens
from siirl_dask.estimates.performance import step_time
from siirl_dask.estimates.speeds import TABLE, speed_of
from siirl_dask.planner import Phase
from tests.models.configs import QWEN2_5_7B, write_config

APART = "cluster.placement={rollout: [0, 1, 2, 3], reward: [0, 1, 2, 3], policy: [4, 5, 6, 7]}"
PARAMETERS, TENSORS = 7_615_616_512, 339
RATE = 0.6 * 64e9  # of a link of PCIe 5.0 x16


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_config(tmp_path_factory.mktemp("7b") / "model", QWEN2_5_7B)


def arguments(model, *overrides):
    return [
        f"model.path={model}", "model.dtype=bfloat16", "cluster.workers=8", "data.url=none", "data.batch_size=128",
        "rollout.engine=vllm", "rollout.max_response_length=1024", "trainer.backend=fsdp", *overrides,
    ]  # fmt: skip


@pytest.fixture(scope="module")
def moves(model):
    @cache
    def found(*overrides, speed=TABLE["h100"]):
        file = load_config_file(shipped("dags/grpo.yaml"), arguments(model, *overrides))
        phases = plan_phases(
            file.config, *dags(file), worker_names(file.config), assume_columns=True
        )
        return step_time(file.config, phases[Phase.TRAIN][0], speed, StepTokens(512, 1024, 1024))

    return found


def by_kind(step):
    """Seconds of a step by what moves, of all nodes."""
    total = Counter()
    for own in step.moves.values():
        total.update(own)
    return total


def test_a_step_of_7b_on_eight_cards_counts_park_sleep_wake_and_reload(moves):
    step = moves("trainer.park=true")
    kinds = by_kind(step)
    assert 0.5 < kinds["policy parks"] + kinds["policy returns"] < 1
    assert 0.5 < kinds["rollout sleeps"] + kinds["rollout wakes"] < 1
    weights = (
        kinds["policy gathers"]
        + kinds["rollout reloads"]
        + step.nodes["weights"]
        + step.nodes["load_weights"]
    )
    assert 1 < weights < 2.5
    assert step.seconds > sum(step.nodes.values()) + sum(kinds.values())


def test_weights_move_after_an_update_and_moments_around_it(moves):
    """4 bytes a parameter of weights and 8 of moments, an eighth of them on each card, out and
    back.
    """
    own = moves("trainer.park=true").moves
    weights = 4 * PARAMETERS / 8 / RATE
    assert own["rollout"]["policy parks"] == pytest.approx(weights)
    assert own["old_logprobs"]["policy returns"] == pytest.approx(weights)
    assert (
        own["update"]["policy returns"]
        == own["update"]["policy parks"]
        == pytest.approx(2 * weights)
    )
    averages = moves("trainer.park=true", "trainer.ema_decay=0.9").moves
    assert averages["update"]["policy parks"] == pytest.approx(3 * weights)


def test_each_tensor_that_is_reloaded_takes_its_time(moves):
    assert moves().moves["load_weights"]["rollout reloads"] == pytest.approx(TENSORS * 3e-3)
    adapters = moves("trainer.lora.rank=16").moves.get("load_weights", {})
    assert "rollout reloads" not in adapters, "vLLM's own layers take adapters"


def test_graphs_go_to_the_host_at_level_2_and_weights_as_well_at_level_1(moves):
    two, one = (by_kind(moves(f"rollout.vllm.sleep_level={level}")) for level in (2, 1))
    eager = by_kind(moves("rollout.vllm.enforce_eager=true"))
    mapped, copied = 1e9 / 200e9, 1e9 / RATE
    assert two["rollout sleeps"] - eager["rollout sleeps"] == pytest.approx(mapped + copied)
    assert two["rollout wakes"] - eager["rollout wakes"] == pytest.approx(mapped + copied)
    for kind in ("rollout sleeps", "rollout wakes"):
        assert one[kind] - two[kind] == pytest.approx(2 * PARAMETERS / RATE)
    assert not {"rollout sleeps", "rollout wakes"} & {*by_kind(moves("rollout.vllm.sleep_level=0"))}


def test_nothing_sleeps_where_roles_have_workers_of_their_own(moves):
    assert set(by_kind(moves(APART, "trainer.park=true"))) == {"policy gathers", "rollout reloads"}


def test_cards_share_the_memory_of_their_host(moves):
    narrow = speed_of("h100", ["host_memory=64e9"])
    shared = moves("trainer.park=true", speed=narrow).moves["update"]["policy parks"]
    alone = moves("trainer.park=true", "cluster.workers=2", speed=narrow).moves["update"][
        "policy parks"
    ]
    assert shared == pytest.approx(8 * PARAMETERS / 8 / (0.6 * 64e9 / 8))
    assert alone == pytest.approx(8 * PARAMETERS / 2 / (0.6 * 64e9 / 2))


def test_nothing_moves_on_a_cpu(moves):
    assert moves("trainer.park=true", speed=speed_of("cpu")).moves == {}


def test_each_move_has_a_row_of_its_own(model, capsys):
    config = str(shipped("dags/grpo.yaml"))
    main(["plan", config, *arguments(model, "trainer.park=true"), "--on", "h100"])
    lines = [line.strip() for line in capsys.readouterr().out.split("== time ==")[1].splitlines()]
    rows = [" ".join(line.split()[:3]) for line in lines if line.startswith("- ")]
    assert rows == [
        "- policy parks", "- rollout wakes", "- rollout sleeps", "- policy returns", "- policy returns",
        "- policy parks", "- policy gathers", "- rollout wakes", "- rollout reloads",
    ]  # fmt: skip
    assert all(float(line.split()[3]) > 0 for line in lines if line.startswith("- "))
