"""Images in micro-batches: each once, wherever rows show it; what learns; critics, references,
adapters.
"""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch.testing import assert_close

from siirl_dask.algorithms import policy_gradient, value_clip
from siirl_dask.config import (
    Backend,
    Config,
    Dtype,
    Engine,
    FsdpConfig,
    LoraConfig,
    ModelConfig,
    RolloutConfig,
    TrainerConfig,
    VisionPart,
)
from siirl_dask.context import Device, Rank
from siirl_dask.errors import ConfigError
from siirl_dask.images import load_processor
from siirl_dask.models.loading import load_pretrained, model_class
from siirl_dask.rollout.preflight import check_engine
from siirl_dask.tasks.tiny_model import tiny_model
from siirl_dask.tasks.tiny_vlm import tiny_vlm
from siirl_dask.testing.image_rows import READ, PlainModel, image_rows, pack
from siirl_dask.testing.ranks import run_ranks
from siirl_dask.testing.rows import copied_weights, random_rows, signs
from siirl_dask.training import TrainBatch, ValueBatch, build_critic, build_reference, build_trainer
from siirl_dask.training.batch_images import ImageInputs
from siirl_dask.training.model.heads import PolicyNetwork
from siirl_dask.training.model.trial import use_row_layout
from siirl_dask.training.packing import micro_batches
from siirl_dask.training.preflight import (
    check_critic,
    check_reference,
    check_trainer,
    count_adapters,
)
from tests.settings import trainer_config
from tests.training.test_hugging_face import image_text_model

FAMILIES = ("qwen2_5_vl", "qwen3_vl")
ADAPTED = {"lora_rank": 2, "lora_alpha": 4.0, "eps": 1e-6}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    parent = tmp_path_factory.mktemp("images")
    return {
        family: tiny_vlm(parent / family, seed=1, family=family, depth=2) for family in FAMILIES
    }


@pytest.fixture(params=FAMILIES)
def folder(folders, request):
    return folders[request.param]


def network_of(folder):
    path = str(folder)
    model = load_pretrained(model_class(path, path), path, torch.float32, path)
    inputs = ImageInputs.load(path, READ, model)
    network = PolicyNetwork(model, device=torch.device("cpu"), temperature=0.7, inputs=inputs)
    use_row_layout(network, path)
    return network


def build(folder, make=build_trainer, images=READ, rank=None, model=None, **settings):
    arguments = {"model": model or ModelConfig(path=str(folder)), "images": images}
    if make is not build_critic:
        arguments["rollout"] = RolloutConfig(temperature=0.7)
    return make(
        Device("w0"), rank or Rank(), trainer=trainer_config(**{"lr": 1e-3} | settings), **arguments
    )


def batch_of(trainer, rows):
    logprobs = trainer.logprobs(rows).logprobs
    return TrainBatch(
        rows=rows, old_logprobs=logprobs, rollout_logprobs=logprobs, advantages=signs(rows)
    )


def test_a_micro_batch_has_each_image_once_and_every_place_knows_which_of_its_tokens_it_is(folders):
    rows = image_rows(folders["qwen3_vl"])
    inputs = network_of(folders["qwen3_vl"]).inputs
    (batch,) = micro_batches(pack(rows), 10**6, inputs=inputs)
    images = batch.images.images
    assert len(images) == len({image for *_, shown in rows for image in shown}) == 4
    # computed token of each token of whole rows, which are packed shortest first
    whole = batch.shared.whole
    feature = torch.full((batch.input_ids.numel(),), -1)
    feature[batch.images.places] = batch.images.features
    begin = dict(
        zip(
            images,
            [0, *torch.tensor([inputs.tokens(image) for image in images]).cumsum(0).tolist()],
            strict=False,
        )
    )
    at = 0
    for prompt, response, shown in sorted(rows, key=lambda row: len(row[0]) + len(row[1])):
        own = feature[whole[at : at + len(prompt) + len(response)]].tolist()
        expected = [
            begin[image] + token for image in shown for token in range(inputs.tokens(image))
        ]
        assert [each for each in own if each >= 0] == expected
        assert [number for number, each in enumerate(own) if each >= 0] == [
            number for number, token in enumerate(prompt) if token == inputs.image_token
        ]
        at += len(prompt) + len(response)


def test_positions_are_those_of_each_row_by_itself(folder):
    rows, network = image_rows(folder, sampled=True), network_of(folder)
    (batch,) = micro_batches(pack(rows), 10**6, inputs=network.inputs)
    order = sorted(range(len(rows)), key=lambda row: len(rows[row][0]) + len(rows[row][1]))
    at = 0
    for prompt, response, shown in [rows[row] for row in order]:
        ids = torch.tensor([[*prompt, *response]])
        kinds = torch.zeros_like(ids)
        kinds[0, : len(prompt)] = ids[0, : len(prompt)] == network.inputs.image_token
        grids = (
            torch.tensor([each.grid for each in network.inputs.pixels(shown)]) if shown else None
        )
        own, _ = network.model.model.get_rope_index(
            ids, mm_token_type_ids=kinds, image_grid_thw=grids
        )
        there = batch.position_ids[:, 0, batch.shared.whole[at : at + ids.shape[1]]]
        assert torch.equal(there[1:], own[:, 0])
        assert there[0].tolist() == list(range(ids.shape[1]))
        at += ids.shape[1]


def test_a_group_through_the_tower_once_gives_the_gradients_of_each_row_by_itself(folder):
    """The tower sees 4 images in place of 9 showings of them."""
    rows, patches, gradients = pack(image_rows(folder)), [], []
    for budget in (1, 10**6):
        network = network_of(folder)
        tower, seen = network.model.model.visual, []
        tower.register_forward_pre_hook(lambda _, given, seen=seen: seen.append(len(given[0])))
        network.model.double()
        for batch in micro_batches(rows, budget, inputs=network.inputs):
            logprobs, *_ = network(batch)
            part = signs(rows)[batch.tokens]
            if len(part):
                (logprobs * part).sum().backward()
        patches.append(sum(seen))
        gradients.append({name: each.grad for name, each in network.by_name().items()})
    apart, once = gradients
    for name, gradient in once.items():
        largest = float(apart[name].abs().max())
        assert float((gradient - apart[name]).abs().max()) <= 1e-6 * largest, name
    assert patches[1] < patches[0] / 2


@pytest.mark.parametrize("backend", [Backend.torch, Backend.fsdp])
def test_layers_that_are_computed_again_give_the_same_step(folder, backend):
    rows, weights = pack(image_rows(folder)), []
    for again in (False, True):
        trainer = build(folder, backend=backend, gradient_checkpointing=again)
        trainer.update([batch_of(trainer, rows)], policy_gradient)
        weights.append(copied_weights(trainer))
    for name, weight in weights[0].items():
        assert torch.equal(weight, weights[1][name]), name


@pytest.mark.parametrize("backend", [Backend.torch, Backend.fsdp])
def test_bfloat16_is_off_by_its_last_digits_alone(folder, backend):
    rows, exact = pack(image_rows(folder)), build(folder)
    model = ModelConfig(path=str(folder), dtype=Dtype.bfloat16)
    narrow = build(folder, backend=backend, model=model)
    given, expected = (each.logprobs(rows).logprobs for each in (narrow, exact))
    assert 0 < float((given - expected).abs().max()) < 0.05
    norms = [
        each.update([batch_of(each, rows)], policy_gradient)["grad_norm"]
        for each in (narrow, exact)
    ]
    assert norms[0] == pytest.approx(norms[1], rel=0.05)


SHARDS = {
    "frozen": {"freeze": [VisionPart.visual]},
    "encoder frozen, layer by layer": {"freeze": [VisionPart.encoder], "gather_size": "0B"},
    "offloaded, computed again": {
        "offload": True,
        "gradient_checkpointing": True,
        "gather_size": "0B",
    },
    "adapters": {"lora_targets": ["visual", "q_proj"], **ADAPTED},
}


@pytest.mark.parametrize("settings", SHARDS.values(), ids=SHARDS.keys())
def test_shards_learn_like_the_whole_model_where_a_rank_has_no_images(folders, settings, tmp_path):
    both = run_ranks(2, partial(_two_steps, folders["qwen3_vl"], settings), tmp_path)
    alone = _two_steps(
        folders["qwen3_vl"],
        {name: each for name, each in settings.items() if name in WHOLE},
        Rank(),
    )
    for seen in both:
        assert seen["norm"] == pytest.approx(alone["norm"], rel=1e-5)
        for name, weight in alone["weights"].items():
            assert_close(
                seen["weights"][name],
                weight,
                atol=2e-5,
                rtol=0,
                msg=lambda said, at=name: f"{at}: {said}",
            )


WHOLE = ("freeze", "lora_targets", *ADAPTED)
"""Settings that do not depend on the backend."""


def _two_steps(folder, settings, rank):
    backend = Backend.torch if rank.size == 1 else Backend.fsdp
    trainer = build(folder, rank=rank, backend=backend, **{"lr": 1e-4, "eps": 1e-6} | settings)
    rows = image_rows(folder)
    parts = [row for row in rows if row[2]], [row for row in rows if not row[2]]
    own = pack(rows if rank.size == 1 else parts[rank.rank])
    norms = [
        trainer.update([batch_of(trainer, own)], policy_gradient)["grad_norm"] for _ in range(2)
    ]
    return {"norm": norms, "weights": copied_weights(trainer)}


@pytest.mark.parametrize("backend", [Backend.torch, Backend.fsdp])
def test_a_reference_scores_as_the_policy_did_at_the_start(folder, backend):
    rows = pack(image_rows(folder))
    policy, reference = (
        build(folder, backend=backend),
        build(folder, build_reference, backend=backend),
    )
    before = policy.logprobs(rows).logprobs
    policy.update([batch_of(policy, rows)], policy_gradient)
    assert torch.equal(reference.logprobs(rows).logprobs, before)
    assert float((policy.logprobs(rows).logprobs - before).abs().max()) > 1e-3


@pytest.mark.parametrize("backend", [Backend.torch, Backend.fsdp])
def test_a_critic_learns_from_what_images_show(folder, backend):
    """Rows in the same words have returns that only their images tell."""
    (prompt, response, one), (*_, other) = image_rows(folder)[0], image_rows(folder)[3]
    rows = pack([(prompt, response, one), (prompt, response, other)])
    returns = torch.tensor([1.0, -1.0]).repeat_interleave(len(response))
    critic = build(folder, build_critic, backend=backend, lr=3e-3)
    assert not critic.values(rows).any()
    for _ in range(30):
        batch = ValueBatch(rows=rows, old_values=critic.values(rows), returns=returns)
        critic.update([batch], lambda inputs: value_clip(inputs, clip=1e6))
    assert float((critic.values(rows) - returns).square().mean()) < 0.1
    names = {name for name, _ in critic.weights()}
    expected = {name for name, _ in PlainModel(folder).model.named_parameters()} - {
        "lm_head.weight"
    }
    assert names == expected | {"value_head.weight", "value_head.bias"}


TARGETS = {
    "the decoder's": ([], "language_model"),
    "some of the decoder's": (["q_proj", "gate_proj"], "language_model"),
    "the tower's": (["visual"], "visual"),
    "some of the tower's": (["visual.qkv"], "visual"),
    "both": (["language_model", "visual"], None),
}


@pytest.mark.parametrize(("targets", "part"), TARGETS.values(), ids=TARGETS.keys())
def test_adapters_are_of_the_layers_that_were_named(folder, targets, part):
    rows = pack(image_rows(folder))
    trainer = build(folder, lora_targets=targets, **ADAPTED)
    names = [name for name, _ in trainer.adapters()]
    parts = {name.split(".")[1] for name in names}
    assert parts == ({part} if part else {"language_model", "visual"})
    layers = {name.split(".")[-3] for name in names}
    wanted = {target.rpartition(".")[2] for target in targets} - {"visual", "language_model"}
    assert not wanted or layers == wanted
    size = count_adapters(str(folder), trainer_config(lora_targets=targets, **ADAPTED))
    assert size.total == sum(tensor.numel() for _, tensor in trainer.adapters())
    assert size.tensors == len(names)
    before = trainer.logprobs(rows).logprobs
    trainer.update([batch_of(trainer, rows)], policy_gradient)
    trainer.update([batch_of(trainer, rows)], policy_gradient)
    assert_close(trainer.base_logprobs(rows).logprobs, before, atol=1e-6, rtol=0)
    assert float((trainer.logprobs(rows).logprobs - before).abs().max()) > 1e-4


def test_adapters_of_a_layer_that_is_not_there_are_refused_before_anything_starts(folder):
    with pytest.raises(ConfigError, match=r"no linear layer 'visual.q_proj'.*visual.qkv"):
        count_adapters(str(folder), trainer_config(lora_targets=["visual.q_proj"], **ADAPTED))


def test_adapters_of_the_tower_learn_alike_on_both_backends(folder):
    rows, weights = pack(image_rows(folder)), []
    for backend in (Backend.torch, Backend.fsdp):
        trainer = build(
            folder, backend=backend, lora_targets=["language_model", "visual"], **ADAPTED
        )
        for _ in range(2):
            trainer.update([batch_of(trainer, rows)], policy_gradient)
        weights.append(copied_weights(trainer))
    for name, weight in weights[0].items():
        assert_close(
            weights[1][name], weight, atol=1e-5, rtol=0, msg=lambda said, at=name: f"{at}: {said}"
        )


def test_a_model_that_sees_images_learns_from_text_alone_where_none_are_read(folder):
    """Nothing runs its tower, so that keeps its weights, also against weight decay, and takes no
    optimizer state.
    """
    trainer = build(folder, images=None, weight_decay=0.1)
    before, rows = copied_weights(trainer), random_rows([(3, 4), (5, 6)])
    trainer.update([batch_of(trainer, rows)], policy_gradient)
    after = copied_weights(trainer)
    assert {name for name in after if torch.equal(after[name], before[name])} == {
        name for name in before if name.startswith("model.visual.")
    }
    assert not [name for name in trainer.state()["optimizer"] if name.startswith("model.visual.")]
    with pytest.raises(ValueError, match="images"):
        trainer.logprobs(pack(image_rows(folder)))


def test_prompts_with_places_for_images_that_were_left_out_are_refused(folders):
    """A placeholder in a response is another matter: it was sampled."""
    rows, trainer = image_rows(folders["qwen3_vl"]), build(folders["qwen3_vl"])
    with pytest.raises(ValueError, match="reads the column 'images'"):
        trainer.logprobs(replace(pack(rows), images=None))
    prompt, response, _ = next(
        row for row in image_rows(folders["qwen3_vl"], sampled=True) if not row[2]
    )
    sampled = pack([(prompt, response, ())])
    assert torch.equal(
        trainer.logprobs(replace(sampled, images=None)).logprobs, trainer.logprobs(sampled).logprobs
    )


def config_of(**settings):
    return Config(trainer=TrainerConfig(**settings), critic=TrainerConfig(**settings), images=READ)


@pytest.mark.parametrize("check", [check_trainer, check_critic, check_reference])
@pytest.mark.parametrize("option", ["sequence_parallel", "tensor_parallel"])
def test_rows_with_images_are_not_split_over_workers(folder, check, option):
    trainer = TrainerConfig(backend=Backend.fsdp, fsdp=FsdpConfig(**{option: 2}))
    options = {"model": ModelConfig(path=str(folder)), "trainer": trainer, "images": READ}
    with pytest.raises(ConfigError, match=rf"trainer\.fsdp\.{option}=2 with images\.column"):
        check(options, ["a", "b"], config_of())


WRONG = {
    "a model of text": ({}, READ, "sees no images"),
    "parts of a model of text": (
        {"freeze": [VisionPart.visual]},
        None,
        r"trainer\.freeze=\['visual'\].*no such parts",
    ),
    "a rate of a model of text": ({"visual_lr": 1e-3}, None, r"trainer\.visual_lr=0\.001"),
}


@pytest.mark.parametrize(("settings", "images", "said"), WRONG.values(), ids=WRONG.keys())
def test_a_model_of_text_has_no_images_and_no_parts(tmp_path, settings, images, said):
    folder = tiny_model(tmp_path / "model")
    options = {
        "model": ModelConfig(path=str(folder)),
        "trainer": TrainerConfig(**settings),
        "images": images,
    }
    with pytest.raises(ConfigError, match=said):
        check_trainer(options, ["a"], config_of())


@pytest.mark.parametrize("kind", ["qwen3_5", "qwen3_5_moe"])
def test_images_for_a_model_whose_text_alone_is_trained_are_refused_by_its_name(tmp_path, kind):
    """vLLM and transformers would see them, and the trainer has no positions for its rows."""
    image_text_model(tmp_path, kind)
    model = ModelConfig(path=str(tmp_path))
    said = f"is a '{kind}': of models that see images expected one of qwen2_vl"
    for check in (check_trainer, check_critic, check_reference):
        options = {"model": model, "trainer": TrainerConfig(), "images": READ}
        with pytest.raises(ConfigError, match=said):
            check(options, ["a"], config_of())
    for engine in (Engine.transformers, Engine.vllm):
        options = {"model": model, "rollout": RolloutConfig(engine=engine), "images": READ}
        with pytest.raises(ConfigError, match=said):
            check_engine(options, ["a"], config_of())
    with pytest.raises(ConfigError, match=said):
        load_processor(str(tmp_path), READ)


IDLE = {
    "everything": (
        {"freeze": [VisionPart.visual, VisionPart.language_model]},
        READ,
        "nothing of the model is left to learn",
    ),
    "in pieces": (
        {"freeze": [VisionPart.encoder, VisionPart.projector, VisionPart.language_model]},
        READ,
        "nothing of the model",
    ),
    "but the unseen": ({"freeze": [VisionPart.language_model]}, None, "the tower sees no images"),
    "a rate for nothing": ({"visual_lr": 1e-3}, None, "no images are read"),
}


@pytest.mark.parametrize(("settings", "images", "said"), IDLE.values(), ids=IDLE.keys())
def test_a_policy_that_would_not_learn_is_refused(folders, settings, images, said):
    options = {
        "model": ModelConfig(path=str(folders["qwen3_vl"])),
        "trainer": TrainerConfig(**settings),
    }
    with pytest.raises(ConfigError, match=said):
        check_trainer({**options, "images": images}, ["a"], config_of())


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"freeze": [VisionPart.visual]}, "trainer.freeze has the tower"),
        ({"freeze": [VisionPart.projector, VisionPart.encoder]}, "trainer.freeze has the tower"),
        ({"lora": LoraConfig(rank=2)}, "no adapters are in the tower; add 'visual'"),
        (
            {"lora": LoraConfig(rank=2, targets=["q_proj", "language_model"])},
            "no adapters are in the tower",
        ),
    ],
)
def test_a_rate_of_a_tower_of_which_nothing_learns_is_refused(settings, said):
    with pytest.raises(ConfigError, match=said):
        TrainerConfig(visual_lr=1e-5, **settings)
    assert (
        TrainerConfig(visual_lr=1e-5, lora=LoraConfig(rank=2, targets=["visual.qkv"])).visual_lr
        == 1e-5
    )


def test_frozen_parts_take_no_gradients_and_no_moments(folders):
    held = {}
    for freeze in ((), (VisionPart.visual,), (VisionPart.encoder,)):
        options = {
            "model": ModelConfig(path=str(folders["qwen3_vl"])),
            "trainer": TrainerConfig(freeze=[*freeze]),
        }
        cost = check_trainer({**options, "images": READ}, ["a"], config_of())
        named = PlainModel(folders["qwen3_vl"]).model.named_parameters()
        tower = {name: p.numel() for name, p in named if name.startswith("model.visual.")}
        held[freeze] = cost.device.held
        if freeze == (VisionPart.visual,):
            assert cost.device.held["frozen weights in float32"] == 4 * sum(tower.values())
        if freeze == (VisionPart.encoder,):
            encoder = {name: size for name, size in tower.items() if "merger" not in name}
            assert cost.device.held["frozen weights in float32"] == 4 * sum(encoder.values())
    total = sum(p.numel() for p in PlainModel(folders["qwen3_vl"]).model.parameters())
    assert held[()]["weights in float32"] == 4 * total
