"""Every family of models is scored, sampled and exported as plain transformers does, and
docs/models.md says how.
"""

import logging
import random
import re
from copy import deepcopy
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.testing import assert_close
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, GenerationConfig

from siirl_dask.algorithms import policy_loss, ppo_clip
from siirl_dask.config import Backend, Dtype, LoraConfig, ModelConfig, RolloutConfig, TrainerConfig
from siirl_dask.context import Device, Rank
from siirl_dask.errors import ConfigError, DataError
from siirl_dask.models import broken_imports
from siirl_dask.models.architecture import empty_model, read_config
from siirl_dask.models.loading import correct_modules
from siirl_dask.models.planned_models import GENERATED, PADDED
from siirl_dask.models.planned_models import REFUSED as UNCOMPUTED
from siirl_dask.models.shapes import weight_shapes
from siirl_dask.models.weight_files import check_weights
from siirl_dask.models.weight_names import lacking
from siirl_dask.rollout.transformers_engine.decoding import decode, use_decoding
from siirl_dask.rollout.transformers_engine.engine import TransformersEngine
from siirl_dask.rollout.transformers_engine.plain_generate import check_generate, generate
from siirl_dask.rollout.weight_loading import WeightLoader
from siirl_dask.tasks.tiny_model import tiny_tokenizer
from siirl_dask.testing.ranks import run_ranks
from siirl_dask.testing.reference_model import response_logprobs
from siirl_dask.testing.rows import grouped_rows, split_rows
from siirl_dask.training import TrainBatch, build_critic, build_trainer
from siirl_dask.training.files.hugging_face import write_hugging_face
from siirl_dask.training.files.verify import check_export
from siirl_dask.training.model.row_layout import decoder_of
from siirl_dask.training.model.trial import _warn_once
from siirl_dask.training.packing import micro_batches
from siirl_dask.training.parallel.dtensor import full_tensor
from tests.settings import trainer_config
from tests.training.families import CHOOSING, CHOSEN, FAMILIES, REFUSED, SIZES, TOKENS, written

ROOT = Path(__file__).parents[2]
QUICK = (
    "qwen2",
    "qwen2_moe",
    "qwen3_5_text",
    "gemma2",
    "gpt_oss",
    "granite",
    "lfm2",
    "bloom",
    "llama4_text",
)
GROUPS = [
    (5, [7, 3]),
    (9, [30]),
    (2, [1]),
    (17, [23, 4, 12]),
    (3, [40]),
    (20, [50, 100]),
    (30, [570]),
    (64, [64, 1]),
]
"""Tokens of prompts, and of the responses of each: around windows of 8, and chunks of 16 and 64."""
SHARDED = [
    ("qwen2", "mixtral", "gemma2", "gemma3n_text", "gpt_oss", "lfm2_moe", "olmo_hybrid", "gpt2"),
    (
        "llama",
        "qwen3_5_moe_text",
        "gemma4_text",
        "deepseek_v3",
        "nemotron_h",
        "falcon_h1",
        "phimoe",
        "bloom",
    ),
]
"""Their parameters are made of several, their buffers come of the config, or their layers are
called otherwise."""
OTHERS = [name for name in FAMILIES if not any(name in part for part in SHARDED)]
PARTS = [*SHARDED, *(pytest.param(OTHERS[first::4], marks=pytest.mark.sweep) for first in range(4))]
"""Some families for each test: of all one would take longer than a test may."""
LEARNED = 20  # steps of greedy sampling
DOCUMENTED = {"packed": "packed", "padded": "with padding", "own": "own", "generate": "`generate`"}


def marked(families, mark):
    return [pytest.param(name, marks=() if name in QUICK else mark, id=name) for name in families]


@pytest.fixture(scope="module", params=marked(FAMILIES, pytest.mark.slow))
def made(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("family") / "model"
    return request.param, folder, written(folder, request.param)


def trainer_of(folder, trainer=None, rank=None, longest_row=None):
    model = ModelConfig(path=str(folder), longest_row=longest_row)
    return build_trainer(
        Device("w0"),
        rank or Rank(),
        model=model,
        trainer=trainer or trainer_config(),
        rollout=RolloutConfig(),
    )


def weighed(logprobs):
    """A loss that weighs each token otherwise."""
    return (logprobs * torch.linspace(-1, 1, len(logprobs))).sum()


def plain_logprobs(model, rows):
    return torch.cat(
        [
            response_logprobs(model, row[:n].tolist(), row[n:].tolist())
            for row, n in split_rows(rows)
        ]
    )


def errors(folder, model, rows, trainer=None, rank=None):
    """How far log-probs and gradients are from those of plain transformers, these as shares of
    the largest.
    """
    policy = trainer_of(folder, trainer, rank)
    expected = plain_logprobs(model, rows)
    model.zero_grad()
    weighed(expected).backward()
    network = policy._network
    network.requires_grad_(True)
    (batch,) = micro_batches(rows, len(rows.tokens))
    logprobs, *_ = network(batch)
    weighed(logprobs).backward()
    found = {
        name: parameter.grad
        for name, parameter in network.by_name().items()
        if parameter.grad is not None
    }
    ranks = 1 if rank is None else rank.size  # all with these rows, over which gradients are summed
    found = {name: full_tensor(grad) / ranks for name, grad in found.items()}
    own = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    largest = max(float(grad.abs().max()) for grad in own.values())
    off = [float((found[name] - grad).abs().max()) for name, grad in own.items()]
    off += [float(grad.abs().max()) for name, grad in found.items() if name not in own]
    return (
        float((logprobs - expected).detach().abs().max()),
        max(off) / largest,
        str(network.layout),
    )


def test_log_probs_and_gradients_are_those_of_plain_transformers_for_each_row_alone(made):
    name, folder, model = made
    rows = grouped_rows(GROUPS)
    *found, layout = errors(folder, model, rows)
    assert max(as_shares_of_bounds(found, model, rows)) < 1
    assert layout == FAMILIES[name].rows
    assert (layout == "padded") is (FAMILIES[name].kind in PADDED)


def as_shares_of_bounds(found, model, rows):
    """Errors of log-probs and gradients as shares of 1e-5, or of what plain transformers itself is
    off from float64 where float32 carries less: sums of a gated delta rule do so in the order of
    some CPUs.

    ``model`` has the gradients of plain transformers.
    """
    if max(found) < 1e-5:
        return [off / 1e-5 for off in found]
    exact = deepcopy(model).double()
    exact.set_experts_implementation("eager")  # others take no float64
    exact.zero_grad()
    expected = plain_logprobs(exact, rows)
    weighed(expected.float()).backward()
    with torch.no_grad():
        of_logprobs = float((plain_logprobs(model, rows) - expected).abs().max())
    grads = {name: each.grad for name, each in exact.named_parameters() if each.grad is not None}
    own = dict(model.named_parameters())
    largest = max(float(grad.abs().max()) for grad in grads.values())
    of_gradients = max(float((own[name].grad - grads[name]).abs().max()) for name in grads)
    bounds = (max(1e-5, of_logprobs), max(1e-5, of_gradients / largest))
    return [off / bound for off, bound in zip(found, bounds, strict=True)]


def test_a_folder_that_lacks_any_tensor_is_refused(made):
    _, folder, _ = made
    check_weights(str(folder))
    model = empty_model(read_config(str(folder)))
    shapes = weight_shapes(str(folder))

    def is_refused(there):
        try:
            return bool(lacking(model, there))
        except ConfigError:  # experts that lack one
            return True

    for lost in random.Random(0).sample(sorted(shapes), min(12, len(shapes))):
        assert is_refused({name: shape for name, shape in shapes.items() if name != lost}), lost


@pytest.mark.slow
@pytest.mark.parametrize("made", marked(FAMILIES, pytest.mark.sweep), indirect=True)
def test_a_critic_sees_the_hidden_states_of_plain_transformers(made):
    _, folder, model = made
    rows = grouped_rows(GROUPS)
    settings = {"model": ModelConfig(path=str(folder)), "trainer": trainer_config()}
    critic = build_critic(Device("w0"), Rank(), **settings)
    weight = torch.randn(
        critic._network.value_head.weight.shape, generator=torch.Generator().manual_seed(0)
    )
    with torch.no_grad():
        critic._network.value_head.weight.copy_(weight)
    expected = []
    for row, prompt in split_rows(rows):
        with torch.no_grad():
            states = decoder_of(model)(row[None], use_cache=False).last_hidden_state[0]
        expected.append((states @ weight.T)[prompt - 1 : -1, 0])
    assert_close(critic.values(rows), torch.cat(expected), atol=1e-4, rtol=1e-4)


def greedy(logits, rows, at):
    best = logits.log_softmax(-1).max(-1)
    return best.indices, best.values


def test_the_engine_samples_the_tokens_of_plain_forward_passes_with_their_log_probs(made):
    name, folder, model = made
    draw = torch.Generator().manual_seed(5)
    prompts = [
        torch.randint(0, 250, (length,), generator=draw).tolist() for length in (3, 11, 11, 30)
    ]
    prompts.append(prompts[1])
    engine = AutoModelForCausalLM.from_pretrained(folder).eval()
    correct_modules(engine)
    engine.generation_config = GenerationConfig()
    own = use_decoding(engine)
    sample = decode
    if not own:
        check_generate(engine, str(folder))
        sample = generate
    tokens, logprobs = sample(engine, prompts, [LEARNED] * len(prompts), frozenset(), 0, greedy)
    for row, prompt in enumerate(prompts):
        response = tokens[row].tolist()
        with torch.no_grad():
            logits = model(torch.tensor([prompt + response]), use_cache=False).logits[
                0, len(prompt) - 1 : -1
            ]
        expected = logits.log_softmax(-1).max(-1)
        assert response == expected.indices.tolist()
        assert (logprobs[row] - expected.values).abs().max() < 1e-4
    assert ("own" if own else "generate") == FAMILIES[name].loop
    assert own is (FAMILIES[name].kind not in GENERATED)


@pytest.mark.slow
def test_an_exported_model_has_the_names_of_the_base_and_the_log_probs_of_the_trainer(
    made, tmp_path
):
    _, folder, _ = made
    weights = {name: tensor + 0.01 for name, tensor in trainer_of(folder).weights()}
    write_hugging_face(tmp_path, weights, str(folder), Dtype.float32)
    check_export(tmp_path, weights, str(folder), Dtype.float32)
    assert (tmp_path / "config.json").read_text() == (folder / "config.json").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("made", marked(FAMILIES, pytest.mark.sweep), indirect=True)
def test_adapters_are_merged_as_they_are_trained(made):
    name, folder, _ = made
    trainer = TrainerConfig(lr=1e-3, lora=LoraConfig(rank=4))
    if not FAMILIES[name].lora:
        with pytest.raises(ConfigError, match=r"no layers of torch\.nn\.Linear"):
            trainer_of(folder, trainer)
        return
    policy = trainer_of(folder, trainer)
    rows = grouped_rows(GROUPS[:4])
    before = policy.logprobs(rows).logprobs
    advantages = torch.sin(torch.arange(len(before)).float())
    batch = TrainBatch(
        rows=rows, old_logprobs=before, advantages=advantages, rollout_logprobs=before
    )
    policy.update([batch, batch], partial(policy_loss, surrogate=ppo_clip))
    after = policy.logprobs(rows).logprobs
    merged = AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation=FAMILIES[name].attention
    ).eval()
    correct_modules(merged)
    merged.load_state_dict(dict(policy.weights()), strict=False)
    with torch.no_grad():
        expected = plain_logprobs(merged, rows)
    assert (after - before).abs().max() > 1e-3
    assert (after - expected).abs().max() < 1e-4


def sharded_errors(root, families, rank):
    """Errors of families, as shares of their bounds, on a rank that holds half of each
    parameter.
    """
    broken_imports.hide()
    logging.disable(logging.WARNING)
    found = {}
    for name in families:
        folder = Path(root) / name
        model = written(folder / str(rank.rank), name)
        torch.distributed.barrier()
        rows = grouped_rows(GROUPS[:4])  # one rank has rows of all lengths
        settings = TrainerConfig(lr=1e-4, backend=Backend.fsdp)
        off = errors(folder / "0", model, rows, settings, rank)[:2]
        found[name] = as_shares_of_bounds(off, model, rows)
    return found


def errors_of_shared_rows(root, rank):
    """Errors of families whose rows two ranks share, and a refusal of one that cannot."""
    broken_imports.hide()
    found = {}
    for name in ("gpt_oss", "gemma2", "qwen3_5_text"):
        folder = Path(root) / name
        written(folder / str(rank.rank), name)
        torch.distributed.barrier()
        if name == "qwen3_5_text":
            with pytest.raises(ConfigError, match="a state along a row"):
                shared_rows_error(folder / "0", name, rank)
        else:
            found[name] = shared_rows_error(folder / "0", name, rank)
    return found


def shared_rows_error(folder, name, rank):
    settings = trainer_config(backend=Backend.fsdp, sequence_parallel=2)
    rows = grouped_rows(GROUPS)
    model = AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation=FAMILIES[name].attention
    )
    with torch.no_grad():
        expected = plain_logprobs(model, rows)
    return float(
        (trainer_of(folder, settings, rank).logprobs(rows).logprobs - expected).abs().max()
    )


@pytest.mark.slow
@pytest.mark.parametrize("families", PARTS, ids=lambda families: families[0])
def test_two_ranks_that_share_the_parameters_score_every_family_as_plain_transformers(
    tmp_path, families
):
    ranks = tmp_path / "ranks"
    ranks.mkdir()
    for found in run_ranks(2, partial(sharded_errors, str(tmp_path), families), ranks):
        assert [*found] == [*families]
        wrong = {name: shares for name, shares in found.items() if not max(shares) < 1}
        assert wrong == {}


@pytest.mark.slow
def test_two_ranks_that_share_the_rows_score_soft_caps_sinks_and_windows_as_plain_transformers(
    tmp_path,
):
    ranks = tmp_path / "ranks"
    ranks.mkdir()
    for found in run_ranks(2, partial(errors_of_shared_rows, str(tmp_path)), ranks):
        assert [*found] == ["gpt_oss", "gemma2"]
        assert max(found.values()) < 1e-5


def test_a_model_that_takes_no_packed_rows_is_computed_with_padding_and_one_warning_says_why(
    tmp_path, caplog
):
    written(tmp_path, "bloom")
    _warn_once.cache_clear()
    for _ in range(2):
        trainer_of(tmp_path)
    (message,) = [
        record.message for record in caplog.records if record.name == "siirl_dask.training"
    ]
    assert message.startswith(
        "BloomForCausalLM computes no packed rows, but rows side by side with padding"
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", REFUSED)
def test_what_neither_trainer_nor_engine_computes_rightly_is_refused_by_name(name, tmp_path):
    model = written(tmp_path, name)
    with pytest.raises(ConfigError, match=type(model).__name__):
        trainer_of(tmp_path)
    with pytest.raises(
        ConfigError, match=f"generate gives {type(model).__name__} log-probs that are off by"
    ):
        TransformersEngine(ModelConfig(path=str(tmp_path)))


@pytest.mark.parametrize("name", CHOOSING)
def test_rows_that_have_more_tokens_than_one_of_them_sees_are_right_or_no_trainer_scores_them(
    name, tmp_path
):
    model = written(tmp_path, name)
    policy = trainer_of(tmp_path)
    assert policy._network.layout == CHOOSING[name].rows
    longer = grouped_rows([(6, [CHOSEN - 6, 2 * CHOSEN])])
    if CHOOSING[name].rows == "packed":
        with pytest.raises(DataError, match=f"has {2 * CHOSEN + 6} tokens, expected at most 96"):
            policy.logprobs(longer)
        with pytest.raises(ConfigError, match=r"a token sees 96 .* is 97, expected at most 96"):
            trainer_of(tmp_path, longest_row=CHOSEN + 1)
        longer = grouped_rows([(6, [CHOSEN - 6])])
    trainer_of(tmp_path, longest_row=CHOSEN)
    with torch.no_grad():
        expected = plain_logprobs(model, longer)
    assert_close(policy.logprobs(longer).logprobs, expected, atol=1e-5, rtol=1e-5)


def test_a_model_that_transformers_builds_and_cannot_run_is_refused_by_name(tmp_path):
    """Four heads cannot share the keys of three."""
    settings = {**TOKENS, **SIZES, "num_key_value_heads": 3}
    AutoModelForCausalLM.from_config(CONFIG_MAPPING["llama"](**settings)).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"log-probs of LlamaForCausalLM .* own passes fail"):
        trainer_of(tmp_path)
    with pytest.raises(ConfigError, match="own over LlamaForCausalLM fail: RuntimeError"):
        TransformersEngine(ModelConfig(path=str(tmp_path)))


def test_what_a_plan_says_of_rows_and_loops_is_what_the_trials_of_these_families_find():
    assert {*UNCOMPUTED} == {family.kind for family in REFUSED.values()}
    assert {*PADDED} == {family.kind for family in FAMILIES.values() if family.rows == "padded"}
    assert {*GENERATED} == {
        family.kind for family in FAMILIES.values() if family.loop == "generate"
    }


def test_docs_models_says_of_every_family_how_it_is_computed():
    table = {}
    for line in (ROOT / "docs" / "models.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 4 and cells[1] in DOCUMENTED.values():
            for kind in re.findall(r"`([\w-]+)`", cells[0]):
                table[kind] = cells[1:3]
    expected = {}
    for family in FAMILIES.values():
        expected[family.kind] = [DOCUMENTED[family.rows], DOCUMENTED[family.loop]]
    assert table == expected


def test_weights_go_to_other_libraries_by_the_names_and_in_the_parts_of_the_familys_files(made):
    _, folder, model = made
    files = load_file(folder / "model.safetensors")
    sent = dict(WeightLoader.of_folder(str(folder)).as_in_files(model.named_parameters()))
    assert sent.keys() == files.keys()
    for name, tensor in sent.items():
        assert torch.equal(tensor, files[name]), name
