"""Hidden states with ``model.dtype=bfloat16``: they are bfloat16 from the embeddings on, whatever
learns or scores, and the numbers are those of fsdp; what is learned stays float32.
"""

from math import sqrt

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GemmaConfig,
    GemmaForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
)

from siirl_dask.algorithms import policy_gradient
from siirl_dask.config import Backend, Dtype, ModelConfig, RolloutConfig
from siirl_dask.context import Device, Rank
from siirl_dask.tasks.tiny_model import tiny_model
from siirl_dask.tasks.tiny_vlm import tiny_vlm
from siirl_dask.tasks.vocabulary import VOCABULARY
from siirl_dask.testing.image_rows import READ, image_rows, pack
from siirl_dask.testing.rows import flat, random_rows, signs
from siirl_dask.training import TrainBatch, build_critic, build_reference, build_trainer
from siirl_dask.training.model.row_layout import RowLayout
from siirl_dask.training.parallel.dtensor import full_tensor
from tests.settings import trainer_config

LAYERS, TOWER_LAYERS = 4, 2
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 1024,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": None,
}
SCALED = {  # embeddings, by a buffer, so fsdp refuses them
    "gemma": (GemmaConfig, GemmaForCausalLM),
    "gemma3": (Gemma3TextConfig, Gemma3ForCausalLM),
}
# adds what norms give to the hidden states
OTHERS = {**SCALED, "olmo2": (Olmo2Config, Olmo2ForCausalLM)}
IMAGES = ("qwen2_5_vl", "qwen3_vl")
FAMILIES = ("qwen2", "qwen3", "qwen3_moe", "llama", *OTHERS, *IMAGES)
SHARDED = [family for family in FAMILIES if family not in SCALED]
UNIT = 2.0**-8  # the largest relative error of a number that is rounded to bfloat16


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    parent = tmp_path_factory.mktemp("families")
    return {family: written(parent / family, family) for family in FAMILIES}


def written(folder, family):
    """Write a model whose norms scale by numbers of bfloat16 other than 1."""
    if family in IMAGES:
        tiny_vlm(folder, seed=1, family=family, depth=TOWER_LAYERS)
    elif family in OTHERS:
        config, model = OTHERS[family]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            model(config(**SIZES)).save_pretrained(folder)
    else:
        tiny_model(folder, seed=1, family=family, layers=LAYERS)
    weights = load_file(folder / "model.safetensors")
    numbers = torch.Generator().manual_seed(2)
    for name, weight in weights.items():
        if weight.ndim == 1:
            weights[name] = (
                (weight + 0.1 * torch.randn(weight.shape, generator=numbers)).bfloat16().float()
            )
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def build(folder, make=build_trainer, dtype=Dtype.bfloat16, **settings):
    arguments = {"model": ModelConfig(path=str(folder), dtype=dtype)}
    if folder.name in IMAGES:
        arguments["images"] = READ
    if make is not build_critic:
        arguments["rollout"] = RolloutConfig()
    return make(
        Device("w0"), Rank(), trainer=trainer_config(**{"lr": 1e-3} | settings), **arguments
    )


def rows_of(folder):
    return pack(image_rows(folder)) if folder.name in IMAGES else random_rows([(5, 20)] * 12)


def scores(built, rows):
    if not hasattr(built, "values"):
        return built.logprobs(rows).logprobs
    with torch.no_grad():
        built._network.value_head.weight.fill_(0.5)  # it begins at 0
    return built.values(rows)


def update(trainer, rows):
    old = trainer.logprobs(rows).logprobs
    batch = TrainBatch(rows=rows, old_logprobs=old, rollout_logprobs=old, advantages=signs(rows))
    trainer.update([batch], policy_gradient)
    return {
        name: full_tensor(weight.grad).clone()
        for name, weight in trainer._network.trainable().items()
    }


def dtypes_seen(network):
    """Return a dictionary that each pass fills: types of what modules of the layers, and
    embeddings, take and give.
    """
    seen = {}

    def record(name, module, inputs, named, output):
        numbers = [each for each in (*inputs, *named.values(), output) if isinstance(each, Tensor)]
        seen.setdefault(name, set()).update(
            each.dtype for each in numbers if each.is_floating_point()
        )

    inside = {
        part for layer in (*network.layers(), *network.tower_layers()) for part in layer.modules()
    }
    inside.add(network.model.get_input_embeddings())
    for name, module in network.named_modules():
        if module in inside:
            module.register_forward_hook(
                lambda *seen_of, name=name: record(name, *seen_of), with_kwargs=True
            )
    return seen


@pytest.mark.parametrize("make", [build_trainer, build_reference, build_critic])
@pytest.mark.parametrize("family", FAMILIES)
def test_no_part_of_a_layer_takes_or_gives_float32(folders, family, make):
    built = build(folders[family], make)
    seen = dtypes_seen(built._network)
    scores(built, rows_of(folders[family]))
    assert len(seen) > len(built._network.layers())
    assert {name: types for name, types in seen.items() if types - {torch.bfloat16}} == {}


@pytest.mark.parametrize("settings", [{}, {"lora_rank": 2}, {"gradient_checkpointing": True}])
def test_nor_does_one_that_learns(folders, settings):
    for family in ("qwen3_moe", "qwen3_vl"):
        trainer = build(folders[family], **settings)
        seen = dtypes_seen(trainer._network)
        update(trainer, rows_of(folders[family]))
        assert {name: types for name, types in seen.items() if types - {torch.bfloat16}} == {}


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_gradients_and_moments_are_float32(folders, family):
    trainer = build(folders[family])
    gradients = update(trainer, rows_of(folders[family]))
    assert {gradient.dtype for gradient in gradients.values()} == {torch.float32}
    state = [
        each for each in flat(trainer.state()).values() if isinstance(each, Tensor) and each.ndim
    ]
    assert len(state) >= 3 * len(gradients)  # weights, and two moments
    assert {each.dtype for each in state} == {torch.float32}


@pytest.mark.parametrize("make", [build_trainer, build_critic])
@pytest.mark.parametrize("family", SHARDED)
def test_torch_and_fsdp_score_alike_to_the_bit(folders, family, make):
    rows = rows_of(folders[family])
    whole = scores(build(folders[family], make), rows)
    shards = scores(build(folders[family], make, backend=Backend.fsdp), rows)
    assert whole.std() > 0
    assert torch.equal(whole, shards)


def test_a_mixture_is_not_refused_for_tokens_that_go_to_either_of_two_experts_by_a_rounding(
    tmp_path,
):
    """Each expert has another that a router takes for it as soon as a digit differs."""
    folder = written(tmp_path / "qwen3_moe", "qwen3_moe")
    weights = load_file(folder / "model.safetensors")
    for name, weight in weights.items():
        if name.endswith("mlp.gate.weight"):
            weight[1::2] = weight[::2] * (1 + 2.0**-10)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    for make in (build_critic, build_trainer):
        built = build(folder, make, backend=Backend.fsdp)
        assert built._network.layout is RowLayout.packed


@pytest.mark.parametrize("family", SHARDED)
def test_gradients_of_torch_are_those_of_fsdp_before_it_rounds_them(folders, family):
    """With fsdp the gradients of embeddings and norms are rounded to bfloat16, and again where the
    head is tied.

    Qwen3-VL's tower has LayerNorm, which autocast computes in float32, and its gradient as well:
    what its layers get behind it differs by roundings, see below.
    """
    rows = rows_of(folders[family])
    whole = update(build(folders[family], max_grad_norm=1e6), rows)
    shards = update(build(folders[family], max_grad_norm=1e6, backend=Backend.fsdp), rows)
    for name, gradient in whole.items():
        if family == "qwen3_vl" and "visual" in name:
            bound = rounding(TOWER_LAYERS)
        elif gradient.ndim == 1 or "embed_tokens" in name:
            bound = 2 * UNIT
        else:
            bound = 1e-6
        off = torch.linalg.vector_norm(shards[name] - gradient) / torch.linalg.vector_norm(gradient)
        assert float(off) <= bound, name


def rounding(layers):
    """Return the relative error, in the mean square, of what has passed so many layers and the
    model's two ends.

    A rounding is off by at most ``UNIT / sqrt(3)`` in the mean square, and n independent ones of
    which none is amplified by ``sqrt(n)`` times that. A layer has at most 18: two in each norm, one
    in each product and in its weight (4, one behind the other), in rotation, attention, activation,
    gate and two sums. Embeddings, the last norm, the head and its weight have 5.
    """
    return UNIT / sqrt(3) * sqrt(18 * layers + 5)


@pytest.mark.parametrize("family", FAMILIES)
def test_log_probs_are_off_from_float32_by_no_more_than_roundings_add_up_to(folders, family):
    rows = rows_of(folders[family])
    exact = build(folders[family], dtype=Dtype.float32)
    expected = exact.logprobs(rows).logprobs
    off = build(folders[family]).logprobs(rows).logprobs - expected
    layers = len(exact._network.layers()) + len(exact._network.tower_layers())
    assert 0 < float(off.square().mean().sqrt()) < rounding(layers) * float(expected.std())
