"""An encoder made up on the spot: its embedding of a text is the mean of its hidden states,
whatever is beside it.
"""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import (
    BertConfig,
    BertModel,
    PreTrainedTokenizerFast,
    RobertaConfig,
    RobertaModel,
    T5Config,
)

from siirl_dask.config import Config, ModelConfig
from siirl_dask.context import Device, Rank
from siirl_dask.errors import ConfigError
from siirl_dask.tasks.tiny_model import no_progress_bars
from siirl_dask.training import build_encoder
from siirl_dask.training.preflight import check_encoder

WORDS = ["<unk>", "<pad>", "low", "mid", "high", "up", "down"]


def write_encoder(folder):
    words = Tokenizer(WordLevel({word: at for at, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="<unk>", pad_token="<pad>"
    ).save_pretrained(folder)
    config = BertConfig(
        vocab_size=len(WORDS),
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=32,
    )
    with torch.random.fork_rng(devices=[]), no_progress_bars():
        torch.manual_seed(0)
        BertModel(config, add_pooling_layer=False).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_encoder(tmp_path_factory.mktemp("encoder") / "model")


def build(folder, **options):
    return build_encoder(
        Device("w"), Rank(), model=ModelConfig(path=str(folder)), **({"max_tokens": 32} | options)
    )


def test_an_embedding_is_the_mean_of_the_hidden_states(folder):
    with no_progress_bars():
        model = BertModel.from_pretrained(folder, add_pooling_layer=False).eval()
    with torch.no_grad():
        hidden = model(input_ids=torch.tensor([[2, 5, 4]])).last_hidden_state[0]
    (given,) = build(folder).embeddings(["low up high"])
    torch.testing.assert_close(given, hidden.mean(0))


def test_no_bit_depends_on_the_texts_beside(folder):
    encoder, texts = build(folder), ["low up", "high down mid up low", "mid", ""]
    together = encoder.embeddings(texts)
    assert torch.equal(together, torch.cat([encoder.embeddings([text]) for text in texts]))
    assert together[3].tolist() == [0.0] * 16
    assert encoder.embeddings([]).shape == (0, 16)


def test_a_long_text_is_cut(folder):
    encoder = build(folder, max_tokens=2)
    assert torch.equal(encoder.embeddings(["low up high"]), encoder.embeddings(["low up"]))


def plan(folder, max_tokens=32):
    options = {"model": ModelConfig(path=str(folder)), "max_tokens": max_tokens}
    return check_encoder(options, ["w"], Config())


@pytest.mark.parametrize("refused", [build, plan])
def test_more_tokens_than_the_model_has_places_for_are_refused(folder, refused):
    with pytest.raises(ConfigError, match="max_tokens=33, and it has positions for 32 tokens"):
        refused(folder, max_tokens=33)
    with pytest.raises(ConfigError, match="max_tokens=512, and it has positions for 32 tokens"):
        check_encoder({"model": ModelConfig(path=str(folder))}, ["w"], Config())


@pytest.mark.parametrize("refused", [build, plan])
def test_a_place_of_padding_is_no_place_of_a_token_in_an_encoder(folder, tmp_path, refused):
    """RoBERTa's positions begin behind it."""
    shutil.copytree(folder, tmp_path / "model")
    config = RobertaConfig(
        vocab_size=len(WORDS),
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=34,
    )
    with no_progress_bars():
        RobertaModel(config, add_pooling_layer=False).save_pretrained(tmp_path / "model")
    with pytest.raises(ConfigError, match="max_tokens=33, and it has positions for 32 tokens"):
        refused(tmp_path / "model", max_tokens=33)
    refused(tmp_path / "model", max_tokens=32)
    encoder = build(tmp_path / "model", max_tokens=32)
    assert encoder.embeddings(["low " * 40]).isfinite().all()


@pytest.mark.parametrize("refused", [build, plan])
def test_an_encoder_with_packed_weights_is_refused_by_their_method(folder, tmp_path, refused):
    packed = shutil.copytree(folder, tmp_path / "packed")
    config = json.loads((packed / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "awq"}
    (packed / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"its weights are packed .* quant_method 'awq'"):
        refused(packed)


def test_an_encoder_with_a_decoder_is_refused(tmp_path):
    """T5 would end in the first step, for want of a text for its decoder."""
    T5Config(d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="t5 has a decoder beside its encoder"):
        plan(tmp_path)


def test_plan_knows_the_files_of_an_encoder(folder, tmp_path):
    """It has no pooler, which the mean of hidden states does not want; nor may a layer be lacking."""
    plan(folder)
    wrong = shutil.copytree(folder, tmp_path / "wrong")
    tensors = load_file(wrong / "model.safetensors")
    del tensors["encoder.layer.1.output.dense.weight"]
    save_file(tensors, wrong / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match=r"layer\.1\.output\.dense\.weight is not there"):
        plan(wrong)


def test_a_token_that_the_model_has_no_embedding_of_is_named(folder, tmp_path):
    wrong = shutil.copytree(folder, tmp_path / "wrong")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(wrong)
    tokenizer.add_tokens(["added"])
    tokenizer.save_pretrained(wrong)
    with pytest.raises(
        ConfigError, match=f"makes token {len(WORDS)} of 'low added', and the model"
    ):
        build(wrong).embeddings(["low added"])


def test_a_folder_without_a_model_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"encoder .*nothing"):
        build(tmp_path / "nothing")
