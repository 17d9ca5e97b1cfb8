"""Impossible layouts of shards, tokens and layers are refused before a worker starts."""

import pytest
import torch

from siirl_dask.commands.plan import describe_run
from siirl_dask.config import Backend
from siirl_dask.config.file import load_config_file, shipped
from siirl_dask.context import Rank
from siirl_dask.driver.phases import dags
from siirl_dask.driver.run import run
from siirl_dask.errors import ConfigError
from siirl_dask.models.shapes import count_parameters
from siirl_dask.tasks.tiny_model import tiny_model
from siirl_dask.testing.rows import random_rows
from siirl_dask.training.packing import micro_batches
from siirl_dask.training.parallel.sequence_parallel import shard_tokens
from siirl_dask.training.preflight import check_reference, check_trainer
from tests.settings import digits_overrides, trainer_config

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
    "heads": (
        ["trainer.fsdp.sequence_parallel=3"],
        r"sequence_parallel=3: expected a divisor of the 4 heads of ",
    ),
    "layers": (
        ["trainer.fsdp.tensor_parallel=4"],
        r"tensor_parallel=4: expected a divisor of the role's 6 workers",
    ),
    "keys": (
        ["trainer.fsdp.tensor_parallel=3"],
        r"tensor_parallel=3: expected a divisor of num_key_value_heads=2 of ",
    ),
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


def test_experts_are_not_split_by_tensor_parallelism(overrides, tmp_path):
    """Gradients came out wrong by a tenth when transformers' plan split them."""
    mixture = tiny_model(tmp_path / "mixture", heads=4, kv_heads=2, family="qwen3_moe")
    options = [f"model.path={mixture}", "trainer.fsdp.tensor_parallel=2"]
    file = load_config_file(shipped("quickstart.yaml"), [*overrides, *options])
    with pytest.raises(ConfigError, match=r"tensor_parallel=2: .* is a mixture of 4 experts"):
        describe_run(file.config, *dags(file))


def test_a_possible_layout_is_planned_even_without_the_model(overrides, tmp_path):
    for options in (
        ["trainer.fsdp.shard_size=3"],
        ["trainer.fsdp.sequence_parallel=2"],
        [f"model.path={tmp_path}/elsewhere"],
    ):
        file = load_config_file(
            shipped("quickstart.yaml"), [*overrides, "trainer.fsdp.sequence_parallel=2", *options]
        )
        assert "== memory ==" in describe_run(file.config, *dags(file))


@pytest.mark.parametrize("longest", [24, 128, 1000])
@pytest.mark.parametrize("option", ["sequence_parallel", "tensor_parallel"])
def test_the_tokens_that_a_plan_counts_are_those_of_the_largest_micro_batch(
    digits_config, tmp_path, option, longest
):
    config, ranks = digits_config, 2
    config.model.path = str(tiny_model(tmp_path / "model", heads=4, kv_heads=2))
    config.data.max_prompt_length, config.rollout.max_response_length = 8, longest - 8
    config.trainer = trainer_config(
        backend=Backend.fsdp, max_tokens_per_micro_batch=256, **{option: ranks}
    )
    workers = ["w0", "w1", "w2", "w3"]
    cost = check_trainer({"trainer": config.trainer}, workers, config)
    rows = (
        config.data.batch_size
        * config.rollout.n
        // config.algorithm.minibatches
        // len(workers)
        * ranks
    )
    union = random_rows([(8, longest - 8)] * rows)  # those of the ranks that compute together
    if option == "sequence_parallel":
        rank = Rank(0, ranks)
        batches = [
            shard_tokens(one, torch.zeros_like(one.targets), rank)
            for one in micro_batches(union, 512)
        ]
    else:
        batches = micro_batches(union, 256)
    most = max(batch.input_ids.numel() for batch in batches)
    (said,) = (
        int(part.split()[2].replace(",", ""))
        for part in cost.device.working
        if part.startswith("activations")
    )
    assert most <= said <= max(256, most)


def test_a_reference_in_shards_holds_no_gradients_of_gathered_layers(digits_config):
    config = digits_config
    config.trainer = trainer_config(backend=Backend.fsdp)
    options, workers = {"trainer": config.trainer}, ["w0", "w1"]
    size = count_parameters(config.model.path)
    # the layers are one group: they have less than gather_size
    ends, layers = (2 * 4 * size.largest, 4 * size.total)
    assert check_reference(options, workers, config).memory == 4 * size.total // 2 + ends + layers
    learner = check_trainer(options, workers, config)
    assert learner.memory == 16 * size.total // 2 + 2 * (ends + layers)
    plain = check_trainer({"trainer": trainer_config()}, workers, config)
    assert learner.computing == plain.computing, "gradients of layers are counted with the layers"
