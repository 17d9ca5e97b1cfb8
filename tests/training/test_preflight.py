"""Impossible layouts of shards, tokens and layers are refused before a worker starts."""

import pytest

from siirl_dask.commands.plan import describe_run
from siirl_dask.config.file import load_config_file, shipped
from siirl_dask.driver.phases import dags
from siirl_dask.driver.run import run
from siirl_dask.errors import ConfigError
from siirl_dask.tasks.tiny_model import tiny_model
from tests.conftest import digits_overrides

FSDP = ["trainer.backend=fsdp", "cluster.workers=6", "cluster.placement={}"]
WRONG = {
    "shards": (
        ["trainer.fsdp.shard_size=4"],
        r"role 'policy': trainer.fsdp.shard_size=4: expected a divisor of .* 6 workers",
    ),
    "tokens": (
        ["trainer.fsdp.sequence_parallel=4"],
        r"sequence_parallel=4: expected a divisor of the role's 6 workers",
    ),
    "heads": (["trainer.fsdp.sequence_parallel=3"], r"sequence_parallel=3: expected a divisor of the 4 heads of "),
    "layers": (["trainer.fsdp.tensor_parallel=4"], r"tensor_parallel=4: expected a divisor of the role's 6 workers"),
    "keys": (["trainer.fsdp.tensor_parallel=3"], r"tensor_parallel=3: expected a divisor of num_key_value_heads=2 of "),
    "placed": (
        ["trainer.fsdp.sequence_parallel=2", "cluster.placement={policy: [1, 3, 5]}"],
        r"sequence_parallel=2: expected a divisor of the role's 3 workers",
    ),
}


@pytest.fixture
def overrides(digits_task, tmp_path):
    model = tiny_model(tmp_path / "model", heads=4, kv_heads=2)
    return [*digits_overrides(digits_task, tmp_path / "run"), *FSDP, f"model.path={model}"]


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("start", [describe_run, run])
def test_an_impossible_layout_is_refused_by_plan_and_run(overrides, tmp_path, start, wrong):
    options, message = WRONG[wrong]
    file = load_config_file(shipped("quickstart.yaml"), [*overrides, *options])
    with pytest.raises(ConfigError, match=message):
        start(file.config, *dags(file))
    assert not (tmp_path / "run").exists()


def test_a_possible_layout_is_planned_even_without_the_model(overrides, tmp_path):
    for options in (
        ["trainer.fsdp.shard_size=3"],
        ["trainer.fsdp.sequence_parallel=2"],
        [f"model.path={tmp_path}/elsewhere"],
    ):
        file = load_config_file(shipped("quickstart.yaml"), [*overrides, "trainer.fsdp.sequence_parallel=2", *options])
        assert "== memory ==" in describe_run(file.config, *dags(file))
