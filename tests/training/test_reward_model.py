"""A reward model scores a row like a forward pass of that row alone."""

import json

import pyarrow as pa
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.testing import assert_close
from transformers import (
    CONFIG_MAPPING,
    AutoModelForSequenceClassification,
    LlamaConfig,
    LlamaForSequenceClassification,
)

from siirl_dask.config import Config, Dtype, ModelConfig
from siirl_dask.context import Context, Device, Rank
from siirl_dask.errors import ConfigError, RewardError
from siirl_dask.nodes import score_with_model
from siirl_dask.schema import TYPES
from siirl_dask.tasks.tiny_model import no_progress_bars
from siirl_dask.tasks.vocabulary import VOCABULARY
from siirl_dask.testing.rows import LENGTHS, random_rows
from siirl_dask.training import PackedRows, build_reward_model
from siirl_dask.training.preflight import check_reward_model
from siirl_dask.training.reward_model import _batches

PAD = 256


def write_model(folder, **settings):
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, **{"num_labels": 1, "pad_token_id": PAD, **settings},
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]), no_progress_bars():
        torch.manual_seed(3)
        LlamaForSequenceClassification(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("reward") / "model")


def build(folder, **options):
    return build_reward_model(Device("w"), Rank(), model=ModelConfig(path=str(folder)), **options)


def plan(folder):
    return check_reward_model({"model": ModelConfig(path=str(folder))}, ["w"], Config())


def alone(folder, rows):
    """Score each row by a plain forward pass."""
    with no_progress_bars(), torch.no_grad():
        model = AutoModelForSequenceClassification.from_pretrained(
            folder, dtype=torch.float32
        ).eval()
        texts = rows.tokens.split(rows.offsets.diff().tolist())
        return torch.cat([model(text[None]).logits[0] for text in texts])


@pytest.mark.parametrize("budget", [1, 25, 10_000])
def test_a_score_does_not_depend_on_rows_in_the_same_batch(folder, budget):
    rows = random_rows(LENGTHS)
    scores = build(folder, max_tokens_per_batch=budget).scores(rows)
    assert scores.unique().numel() > 3
    assert_close(scores, alone(folder, rows), atol=1e-5, rtol=0)


def test_rows_ending_with_the_padding_token_score_as_if_alone(folder):
    """The end-of-text token may also be the padding token."""
    tokens, offsets = torch.tensor([5, 6, PAD, 7, 8, 9, 10, PAD, 11]), torch.tensor([0, 3, 7, 9])
    rows = PackedRows(tokens, offsets, torch.tensor([1, 1, 1]))
    assert_close(build(folder).scores(rows), alone(folder, rows), atol=1e-5, rtol=0)


def test_no_rows_give_no_scores(folder):
    assert build(folder).scores(random_rows([])).shape == (0,)


@pytest.mark.parametrize("budget", [1, 7, 12, 100])
def test_batches_have_each_row_once_within_the_budget(budget):
    lengths = [3, 9, 1, 4, 4, 12, 2]
    batches = list(_batches(lengths, budget))
    assert sorted(row for batch in batches for row in batch) == list(range(len(lengths)))
    for batch in batches:
        assert len(batch) == 1 or len(batch) * max(lengths[row] for row in batch) <= budget


def test_dtype_bfloat16_computes_in_bfloat16(folder):
    model = ModelConfig(path=str(folder), dtype=Dtype.bfloat16)
    rows = random_rows(LENGTHS)
    scores = build_reward_model(Device("w"), Rank(), model=model).scores(rows)
    assert scores.dtype == torch.float32
    assert_close(scores, alone(folder, rows), atol=2e-2, rtol=0)
    assert not torch.equal(scores, alone(folder, rows))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_labels": 2}, "it has 2 labels; expected 1"),
        ({"pad_token_id": None}, "a pad_token_id"),
        ({"pad_token_id": VOCABULARY}, f"pad_token_id={VOCABULARY}, and its embedding has"),
        ({"pad_token_id": -1}, "pad_token_id=-1, and its embedding has"),
    ],
)
def test_a_model_without_one_label_or_padding_is_refused(tmp_path, settings, message):
    folder = write_model(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    labels = settings.pop("num_labels", 1)
    config["id2label"] = {str(label): f"LABEL_{label}" for label in range(labels)}
    config["label2id"] = {}
    (folder / "config.json").write_text(json.dumps(config | settings))
    for refused in (build, plan):
        with pytest.raises(ConfigError, match=message):
            refused(folder)


@pytest.mark.parametrize("method", ["awq", "fp8"])
def test_packed_weights_are_refused_by_their_method_as_a_policys_are(tmp_path, method):
    folder = write_model(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": method}
    (folder / "config.json").write_text(json.dumps(config))
    for refused in (build, plan):
        with pytest.raises(ConfigError, match=f"weights are packed .* quant_method '{method}'"):
            refused(folder)


BEHIND_PADDING = {
    "camembert": {},
    "data2vec-text": {},
    "esm": {"mask_token_id": 32},
    "longformer": {"attention_window": [4, 4]},
    "mpnet": {},
    "roberta": {},
    "roberta-prelayernorm": {},
    "xlm-roberta": {},
    "xmod": {"languages": ["en_XX"], "default_language": "en_XX"},
}
"""Encoders whose positions begin behind the place of padding."""


@pytest.mark.parametrize("kind", ["bert", "nystromformer", *BEHIND_PADDING])
def test_rows_of_more_tokens_than_there_are_places_are_refused(tmp_path, kind):
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 2, "vocab_size": VOCABULARY, "num_labels": 1}
    settings = {"pad_token_id": 1, "max_position_embeddings": 66, **BEHIND_PADDING.get(kind, {})}
    config = CONFIG_MAPPING[kind](**sizes, **settings)
    with no_progress_bars():
        AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path)
    places = 64 if kind in BEHIND_PADDING else 66
    model = build(tmp_path)
    rows = random_rows([(1, places - 1)])
    assert_close(model.scores(rows), alone(tmp_path, rows), atol=1e-5, rtol=0)
    longer = random_rows([(1, places)])
    with pytest.raises(ConfigError, match=f"a row has {places + 1} tokens, .* for {places}"):
        model.scores(longer)
    with pytest.raises((IndexError, RuntimeError)):
        alone(tmp_path, longer)
    options = {"model": ModelConfig(path=str(tmp_path))}
    given = Config()
    given.data.max_prompt_length = 1
    given.rollout.max_response_length = places - 1
    check_reward_model(options, ["w"], given)
    given.rollout.max_response_length = places
    with pytest.raises(ConfigError, match=f"positions for {places} tokens, and data.max_prompt"):
        check_reward_model(options, ["w"], given)


def changed(folder, change):
    tensors = load_file(folder / "model.safetensors")
    save_file(change(tensors), folder / "model.safetensors", {"format": "pt"})


def without_score(tensors):
    """As of the policy's folder, given for the reward model's."""
    return {name: tensor for name, tensor in tensors.items() if "score" not in name}


def with_bias(tensors):
    """As of a family whose config.json was made another's."""
    return tensors | {"model.layers.0.self_attn.q_proj.bias": torch.ones(32)}


def in_8_bits(tensors):
    name = "model.layers.0.self_attn.q_proj.weight"
    return tensors | {name: tensors[name].mul(100).to(torch.int8)}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (without_score, r"score.weight is not there"),
        (with_bias, r"q_proj.bias is there, and the layer of that name has none"),
        (in_8_bits, r"q_proj.weight is I8 where one of F32"),
    ],
)
def test_plan_refuses_weights_that_are_not_the_reward_models(tmp_path, change, said):
    folder = write_model(tmp_path / "model")
    plan(folder)
    changed(folder, change)
    with pytest.raises(ConfigError, match=said):
        plan(folder)


def test_a_folder_without_a_reward_model_is_refused(tmp_path):
    folder = write_model(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    # its biases are not there
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "qwen2"}))
    with pytest.raises(ConfigError, match="its weights lack"):
        build(folder)
    with pytest.raises(ConfigError, match=r"q_proj.bias is not there"):
        plan(folder)
    with pytest.raises(ConfigError, match="no such folder"):
        build(tmp_path / "none")


def rows_table(prompts, responses):
    ids = {"prompt_ids": prompts, "response_ids": responses}
    columns = {name: pa.array(values, TYPES[name]) for name, values in ids.items()}
    return pa.table({"row_id": pa.array(range(7, 7 + len(prompts)), pa.int64()), **columns})


def context(model):
    return Context(step=4, run_seed=0, rank=Rank(), device=Device("w"), resource=model)


def test_the_node_scores_prompt_and_response_together(folder):
    ctx = context(build(folder))
    scored = score_with_model(ctx, rows_table([[1, 2], [3]], [[4], [5, 6, 7]]))
    rows = PackedRows(
        torch.tensor([1, 2, 4, 3, 5, 6, 7]), torch.tensor([0, 3, 7]), torch.tensor([2, 1])
    )
    expected = alone(folder, rows)
    assert_close(torch.tensor(scored["reward"].to_pylist()), expected, atol=1e-5, rtol=0)
    assert ctx.metrics["reward/mean"].value == pytest.approx(expected.mean().item(), abs=1e-5)


def test_no_rows_give_an_empty_float32_column(folder):
    assert (
        score_with_model(context(build(folder)), rows_table([], []))["reward"].type == pa.float32()
    )


def test_tokens_of_another_tokenizer_are_refused(folder):
    with pytest.raises(
        ConfigError, match=f"token {VOCABULARY} is none of the reward model's {VOCABULARY}"
    ):
        score_with_model(context(build(folder)), rows_table([[1]], [[VOCABULARY]]))


def test_a_nonfinite_score_names_its_row(folder, tmp_path):
    with no_progress_bars():
        model = AutoModelForSequenceClassification.from_pretrained(folder)
        with torch.no_grad():
            model.get_input_embeddings().weight[9] = float("inf")
        model.save_pretrained(tmp_path / "broken")
    with pytest.raises(RewardError, match="row 8 of step 4"):
        score_with_model(context(build(tmp_path / "broken")), rows_table([[1], [9]], [[2], [2]]))
