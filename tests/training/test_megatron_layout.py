"""Options and models that megatron-core cannot take here are refused before anything starts; its
memory is planned.
"""

import json
from copy import deepcopy

import pytest
from hypothesis import example, given
from transformers import CONFIG_MAPPING

from siirl_dask.commands.plan import describe_run
from siirl_dask.config import (
    Backend,
    Dtype,
    FsdpConfig,
    ImagesConfig,
    LoraConfig,
    MegatronConfig,
    TrainerConfig,
    VisionPart,
)
from siirl_dask.config.file import load_config_file, shipped
from siirl_dask.driver.phases import dags
from siirl_dask.errors import ConfigError
from siirl_dask.models.shapes import count_parameters
from siirl_dask.tasks.tiny_model import tiny_model
from siirl_dask.training.megatron import spec
from siirl_dask.training.megatron.families import check_model, sizes_of
from siirl_dask.training.preflight import check_reference, check_trainer, trainer_groups
from tests.models.configs import forms_of_config
from tests.settings import digits_overrides

OTHERS = {
    "lora.rank": {"lora": LoraConfig(rank=4)},
    "freeze": {"freeze": [VisionPart.visual]},
    "visual_lr": {"visual_lr": 1e-5},
    "liger": {"liger": True},
    "compile": {"compile": True},
    "park": {"park": True},
    "fsdp.offload": {"fsdp": FsdpConfig(offload=True)},
    "fsdp.shard_size": {"fsdp": FsdpConfig(shard_size=2)},
}


@pytest.fixture
def there(monkeypatch):
    """megatron-core can be found, whether it is installed or not: layouts are checked without
    it.
    """
    monkeypatch.setattr(spec, "find_spec", lambda name: name)


def megatron(tensor=1, pipeline=1, experts=None, context=1, chunks=1, divided=False, **settings):
    parallel = MegatronConfig(
        tensor_parallel=tensor, pipeline_parallel=pipeline, virtual_pipeline=chunks, context_parallel=context,
        expert_parallel=experts, distributed_optimizer=divided,
    )  # fmt: skip
    return TrainerConfig(backend=Backend.megatron, megatron=parallel, **settings)


@pytest.mark.parametrize("name", OTHERS)
def test_options_of_other_backends_are_refused(name):
    with pytest.raises(ConfigError, match=rf"trainer\.{name}"):
        megatron(**OTHERS[name])


@pytest.mark.parametrize("backend", [Backend.torch, Backend.fsdp])
def test_other_backends_refuse_its_options(backend):
    with pytest.raises(ConfigError, match=r"pipeline_parallel=2: .*trainer\.backend=megatron"):
        TrainerConfig(backend=backend, megatron=MegatronConfig(pipeline_parallel=2))


def test_a_missing_package_is_named_with_its_extra(digits_config, monkeypatch):
    monkeypatch.setattr(spec, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'siirl_dask\[megatron\]'"):
        check_trainer({"trainer": megatron()}, ["w0"], digits_config)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"tensor": 2, "pipeline": 2},
            r"a replica has 4 ranks, expected a divisor of the role's 6 workers",
        ),
        ({"tensor": 3}, r"tensor_parallel=3: expected a divisor of num_attention_heads=4"),
        (
            {"tensor": 2, "context": 2},
            r"context_parallel=2, .* a replica has 4 ranks, expected a divisor",
        ),
        (
            {"context": 3},
            r"context_parallel=3: expected a divisor of the 4 heads that each of tensor_parallel=1 "
            r"has",
        ),
        (
            {"pipeline": 2, "chunks": 2},
            r"pipeline_parallel=2 times virtual_pipeline=2: expected a divisor",
        ),
        ({"pipeline": 3}, r"pipeline_parallel=3: expected a divisor of num_hidden_layers=2"),
    ],
)
def test_a_grid_that_does_not_divide_workers_or_model_is_refused(
    digits_config, tmp_path, there, settings, message
):
    digits_config.model.path = str(tiny_model(tmp_path / "model", heads=4, kv_heads=2))
    for check in (check_trainer, check_reference):
        with pytest.raises(ConfigError, match=message):
            check(
                {"trainer": megatron(**settings)},
                [f"w{number}" for number in range(6)],
                digits_config,
            )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"experts": 3}, r"expert_parallel=3: expected a divisor of the 4 experts of each layer"),
        (
            {"experts": 8},
            r"expert_parallel=8: expected a divisor of the 12 ranks that have the same layers",
        ),
        ({"experts": 4, "pipeline": 2}, r"expert_parallel=4: expected a divisor of the 6 ranks"),
    ],
)
def test_experts_that_ranks_cannot_share_are_refused(
    digits_config, tmp_path, there, settings, message
):
    digits_config.model.path = str(
        tiny_model(tmp_path / "model", heads=4, kv_heads=4, family="qwen3_moe")
    )
    workers = [f"w{number}" for number in range(12)]
    for check in (check_trainer, check_reference):
        with pytest.raises(ConfigError, match=message):
            check({"trainer": megatron(**settings)}, workers, digits_config)
        check({"trainer": megatron(2, 2, 2)}, workers, digits_config)


def test_chunks_without_stages_are_refused():
    with pytest.raises(
        ConfigError, match=r"virtual_pipeline=2 with trainer\.megatron\.pipeline_parallel=1"
    ):
        MegatronConfig(virtual_pipeline=2)


def test_stages_of_several_chunks_are_planned_with_more_micro_batches_under_way(
    digits_config, tmp_path, there
):
    digits_config.model.path = str(tiny_model(tmp_path / "model", heads=4, kv_heads=2, layers=4))
    workers, times = ["w0", "w1", "w2", "w3"], []
    for chunks in (1, 2):
        config = megatron(pipeline=2, chunks=chunks, max_tokens_per_micro_batch=32)
        working = check_trainer({"trainer": config}, workers, digits_config).device.working
        (label,) = (each for each in working if each.endswith("times"))
        times.append(int(label.split()[-2]))
    assert times == [2, 3]


def test_tokens_without_ranks_to_split_them_are_refused():
    with pytest.raises(
        ConfigError, match=r"sequence_parallel=true with trainer\.megatron\.tensor_parallel=1"
    ):
        MegatronConfig(pipeline_parallel=2, sequence_parallel=True)


def test_a_model_without_experts_spreads_none(digits_config, there):
    with pytest.raises(ConfigError, match=r"expert_parallel=2: .* has no experts"):
        check_trainer({"trainer": megatron(experts=2)}, ["w0", "w1"], digits_config)


def test_experts_over_part_of_the_tensor_ranks_and_others_are_refused():
    with pytest.raises(
        ConfigError, match=r"expert_parallel=3: expected a divisor or .*tensor_parallel=2"
    ):
        MegatronConfig(tensor_parallel=2, expert_parallel=3)
    with pytest.raises(
        ConfigError, match=r"expert_parallel=6: .*tensor_parallel=2 times context_parallel=2"
    ):
        MegatronConfig(tensor_parallel=2, context_parallel=2, expert_parallel=6)


def test_images_are_refused(digits_config, there):
    options = {"trainer": megatron(), "images": ImagesConfig(column="picture")}
    with pytest.raises(
        ConfigError, match=r"trainer\.backend=megatron with images\.column='picture'"
    ):
        check_trainer(options, ["w0"], digits_config)


@example(config={"model_type": "llama", "rope_theta": None})
@given(config=forms_of_config(("llama", "qwen2", "qwen3", "qwen3_moe")))
def test_any_form_of_a_config_gives_the_sizes_that_transformers_reads_or_is_refused(config):
    try:
        whole = CONFIG_MAPPING[config["model_type"]].from_dict(deepcopy(config))
    except Exception:  # of any kind: here it is refused, too
        with pytest.raises(ConfigError):
            sizes_of(config, "model")
        return
    rope = whole.rope_parameters
    try:
        sizes = sizes_of(config, "model")
    except ConfigError:
        has_no_base = rope["rope_theta"] is None
        is_other = rope["rope_type"] != "default" or config.get("attention_bias")
        assert has_no_base or is_other or config.get("mlp_bias")
        return
    assert (rope["rope_type"], rope["rope_theta"]) == ("default", sizes.rope_base)
    assert sizes.kv_heads == whole.num_key_value_heads
    assert sizes.epsilon == whole.rms_norm_eps
    assert sizes.tied is whole.tie_word_embeddings


@pytest.mark.parametrize(
    "change",
    [
        {"model_type": "gemma2"},
        {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}},
        {"use_sliding_window": True},
        {"attention_bias": True},
        {"hidden_act": "gelu"},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_model_that_it_does_not_compute_is_refused(tmp_path, change):
    file = tiny_model(tmp_path / "model") / "config.json"
    check_model(megatron(), str(tmp_path / "model"))
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(
        ConfigError, match=r"trainer\.backend=megatron with model\.path=.*trainer\.backend=fsdp"
    ):
        check_model(megatron(), str(tmp_path / "model"))


def test_the_planned_memory_is_that_of_the_rank_with_most(digits_config, tmp_path, there):
    digits_config.model.path = str(tiny_model(tmp_path / "model", heads=4, kv_heads=2, layers=4))
    size, workers = count_parameters(digits_config.model.path), ["w0", "w1", "w2", "w3"]
    for tensor, pipeline in ((1, 1), (2, 1), (1, 2), (2, 2)):
        config = megatron(tensor, pipeline)
        most = (size.total / pipeline + (size.largest if pipeline > 1 else 0)) / tensor
        cost = check_trainer({"trainer": config}, workers, digits_config)
        assert cost.memory == pytest.approx(16 * most, rel=1e-3)
        assert sum(cost.device.held.values()) == pytest.approx(16 * most, rel=1e-3)
        assert {*trainer_groups({"trainer": config}, 4).values()} == {tensor, tensor * pipeline}
        reference = check_reference({"trainer": config}, workers, digits_config)
        assert sum(reference.device.held.values()) == pytest.approx(4 * most, rel=1e-3)
    digits_config.model.dtype = Dtype.bfloat16
    held = check_trainer({"trainer": megatron(2, 2)}, workers, digits_config).device.held
    assert sum(held.values()) == pytest.approx(18 * most, rel=1e-3)


def test_each_rank_is_planned_with_its_share_of_the_experts(digits_config, tmp_path, there):
    folder = tiny_model(tmp_path / "model", heads=4, kv_heads=2, layers=4, family="qwen3_moe")
    digits_config.model.path = str(folder)
    size, workers = count_parameters(str(folder)), ["w0", "w1", "w2", "w3"]
    assert size.experts == 4 * 4 * 3 * 64 * 64
    for tensor, pipeline, experts, over in (
        (1, 1, None, 1),
        (1, 1, 4, 4),
        (2, 1, 1, 1),
        (2, 1, 4, 4),
        (1, 2, 2, 2),
    ):
        rest = (size.total - size.experts) / pipeline + (size.largest if pipeline > 1 else 0)
        config = megatron(tensor, pipeline, experts)
        held = check_trainer({"trainer": config}, workers, digits_config).device.held
        assert sum(held.values()) == pytest.approx(
            16 * (rest / tensor + size.experts / pipeline / over), rel=1e-3
        )
        linked = tensor * pipeline * max(1, over // tensor)
        assert max(trainer_groups({"trainer": config}, 4).values()) == linked


@pytest.mark.parametrize(
    ("layout", "replicas", "same_experts"),
    [
        ((2, 2, None), 1, 1),
        ((1, 1, None), 4, 4),
        ((2, 1, None), 2, 2),
        ((1, 2, 2), 2, 1),
        ((1, 1, 2), 4, 2),
    ],
)
def test_replicas_that_divide_the_state_are_planned_with_a_share_of_it(
    digits_config, tmp_path, there, layout, replicas, same_experts
):
    folder = tiny_model(tmp_path / "model", heads=4, kv_heads=2, layers=4, family="qwen3_moe")
    digits_config.model.path, size = str(folder), count_parameters(str(folder))
    workers = ["w0", "w1", "w2", "w3"]
    whole, divided = (
        check_trainer({"trainer": megatron(*layout, divided=each)}, workers, digits_config)
        for each in (0, 1)
    )
    before, after = whole.device.held, divided.device.held
    assert before["weights in float32"] == after["weights in float32"]
    saved = before["optimizer state"] - after["optimizer state"]
    assert whole.memory - divided.memory == pytest.approx(saved, abs=16)
    tensor, stages, over = layout[0], layout[1], layout[2] or layout[0]
    experts = 2 * 4 * size.experts / stages / over
    rest = before["optimizer state"] - experts
    most = min(rest, rest / replicas + 2 * 4 * size.largest / tensor)
    most += min(experts, experts / same_experts + 2 * 4 * size.layer / over)
    assert after["optimizer state"] == pytest.approx(most, rel=1e-3)


def test_replicas_of_a_trained_model_alone_divide_its_state():
    with pytest.raises(
        ConfigError, match=r"distributed_optimizer=true: .*trainer\.backend=megatron"
    ):
        TrainerConfig(backend=Backend.fsdp, megatron=MegatronConfig(distributed_optimizer=True))


def test_split_tokens_keep_a_part_of_norms_and_layer_inputs(digits_config, tmp_path, there):
    digits_config.model.path = str(tiny_model(tmp_path / "model", heads=4, kv_heads=2, layers=4))
    # two norms in float32, or an input
    for checkpointing, each in ((False, 2 * (4 + 4 + 4) * 64), (True, 4 * 64)):
        working = []
        for split in (False, True):
            parallel = MegatronConfig(tensor_parallel=2, sequence_parallel=split)
            config = TrainerConfig(
                backend=Backend.megatron, megatron=parallel, gradient_checkpointing=checkpointing,
                max_tokens_per_micro_batch=32,
            )  # fmt: skip
            footprint = check_trainer({"trainer": config}, ["w0", "w1"], digits_config).device
            working.append(sum(footprint.working.values()))
        norms = 2 * (4 + 4 + 4) * 64 if checkpointing else 0  # of the layer that is computed again
        tokens = next(
            int(part.split()[2]) for part in footprint.working if part.startswith("activations of")
        )
        assert working[0] - working[1] == tokens * (4 * each + norms) // 2


def test_ranks_that_share_tokens_are_planned_with_a_part_of_a_long_row_and_all_parameters(
    digits_config, tmp_path, there
):
    digits_config.model.path = str(tiny_model(tmp_path / "model", heads=4, kv_heads=2, layers=4))
    digits_config.rollout.max_response_length = 4096
    workers = ["w0", "w1", "w2", "w3"]
    costs = [
        check_trainer(
            {"trainer": megatron(context=context, max_tokens_per_micro_batch=32)},
            workers,
            digits_config,
        )
        for context in (1, 4)
    ]
    held, shared = (cost.device.held for cost in costs)
    assert held == shared
    assert costs[0].memory == costs[1].memory
    whole, part = (
        int(
            next(each for each in cost.device.working if each.startswith("activations"))
            .split()[2]
            .replace(",", "")
        )
        for cost in costs
    )
    assert part == -(-whole // 4)


def test_a_run_with_megatron_is_planned(digits_task, tmp_path, there):
    options = [
        "trainer.backend=megatron",
        "trainer.megatron.pipeline_parallel=2",
        "cluster.device_memory=80GB",
    ]
    file = load_config_file(
        shipped("quickstart.yaml"), [*digits_overrides(digits_task, tmp_path / "run"), *options]
    )
    assert "optimizer state" in describe_run(file.config, *dags(file))
