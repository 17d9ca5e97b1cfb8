"""An encoder made up on the spot: its embedding of a text is the mean of its hidden states,
whatever is beside it.
"""

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

from siirl_dask.config import ModelConfig
from siirl_dask.context import Device, Rank
from siirl_dask.errors import ConfigError
from siirl_dask.tasks.tiny_model import no_progress_bars
from siirl_dask.training import build_encoder

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


def test_more_tokens_than_the_model_has_places_for_are_refused(folder):
    with pytest.raises(ConfigError, match="max_tokens=33, and it has 32 positions"):
        build(folder, max_tokens=33)


def test_a_folder_without_a_model_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"encoder .*nothing"):
        build(tmp_path / "nothing")
