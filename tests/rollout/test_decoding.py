"""Rows are sampled as transformers' ``generate`` samples them, with less work."""

import random

import pytest
import torch
from torch.testing import assert_close
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    BloomConfig,
    BloomForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from siirl_dask.config import ModelConfig
from siirl_dask.rollout import Sampling
from siirl_dask.rollout.token_sampling import TokenSampler
from siirl_dask.rollout.transformers_engine.decoding import (
    attention_of_text,
    decode,
    use_decoding,
)
from siirl_dask.rollout.transformers_engine.engine import TransformersEngine
from siirl_dask.rollout.transformers_engine.plain_generate import generate
from siirl_dask.tasks.tiny_model import tiny_model
from siirl_dask.testing.reference_model import load_model

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "pad_token_id": 0,
}
END = 63


def prompts(count=6, repeats=3):
    numbers = random.Random(0)
    different = [
        [numbers.randrange(60) for _ in range(numbers.randint(1, 9))] for _ in range(count)
    ]
    return [prompt for prompt in different for _ in range(repeats)]


def sampled(sample, model, rows, limits, seen=None):
    """Tokens and log-probs of each row up to its end; ``seen`` collects the rows of each step."""
    draw = TokenSampler(Sampling(max_tokens=1, temperature=0.7))
    seeds = torch.arange(len(rows)).numpy().astype("uint64")

    def choose(logits, left, at):
        if seen is not None:
            seen.append(left.tolist())
        return draw(logits, seeds[left], at)

    tokens, logprobs = sample(model, rows, limits, frozenset([END]), 0, choose)
    found = []
    for row, scores, limit in zip(tokens.tolist(), logprobs, limits, strict=True):
        length = min(limit, row.index(END) + 1 if END in row else len(row))
        found.append((row[:length], scores[:length]))
    return found


def assert_same(found, expected):
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected]
    for (_, scores), (_, wanted) in zip(found, expected, strict=True):
        assert_close(scores, wanted, atol=1e-4, rtol=0)


def model_of(kind):
    torch.manual_seed(1)
    if kind == "windows":  # narrower than prompts, and than responses
        layers = ["sliding_attention", "full_attention"]
        config = Qwen3Config(**SIZES, layer_types=layers, sliding_window=4, use_sliding_window=True)
        return Qwen3ForCausalLM(config).eval()
    if kind == "soft caps":
        config = Gemma2Config(**SIZES, attn_logit_softcapping=0.01)
        return Gemma2ForCausalLM._from_config(config, attn_implementation="eager").eval()
    if kind == "states":
        return MambaForCausalLM(
            MambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, state_size=4)
        ).eval()
    if kind == "positions of its own":
        return BloomForCausalLM(
            BloomConfig(vocab_size=64, hidden_size=32, n_layer=2, n_head=4, pad_token_id=0)
        ).eval()
    return Qwen3ForCausalLM(Qwen3Config(**SIZES)).eval()


@pytest.mark.parametrize("kind", ["plain", "windows", "soft caps", "states"])
def test_samples_are_those_of_generate(kind):
    rows = prompts()
    # to 56: the cache grows, and rows leave
    limits = [1 + 5 * (row % 12) for row in range(len(rows))]
    model, expected = model_of(kind), sampled(generate, model_of(kind), rows, limits)
    assert use_decoding(model)
    assert_same(sampled(decode, model, rows, limits), expected)


def test_a_model_that_attends_otherwise_is_left_to_generate():
    kind = "positions of its own"
    rows, limits = prompts(2, 2), [6] * 4
    model, expected = model_of(kind), sampled(generate, model_of(kind), rows, limits)
    assert not use_decoding(model)
    assert_same(sampled(generate, model, rows, limits), expected)


def test_a_prompt_of_several_rows_is_computed_once_and_rows_that_have_ended_leave(monkeypatch):
    model, rows, seen, computed = model_of("plain"), prompts(2, 4), [], []
    assert use_decoding(model)
    limits = [2, 2, 2, 9, 9, 9, 2, 2]
    model.get_input_embeddings().register_forward_hook(
        lambda module, given, output: computed.append(given[0].shape)
    )
    sampled(decode, model, rows, limits, seen)
    assert computed[0] == (2, max(map(len, rows)))
    assert seen[1] == [*range(8)]
    assert seen[2] == [row for row in (3, 4, 5) if row in seen[2]]
    assert len(seen) <= 9


def test_an_engine_of_a_model_that_decode_cannot_run_samples_with_generate(tmp_path, monkeypatch):
    folder = tiny_model(tmp_path / "model", seed=1)
    engine = TransformersEngine(ModelConfig(path=str(folder)))
    assert engine._decodes
    rows, sampling = prompts(), Sampling(max_tokens=8)
    quick = engine.generate(rows, range(len(rows)), sampling)
    monkeypatch.setattr(
        "siirl_dask.rollout.transformers_engine.engine.use_decoding", lambda model: False
    )
    plain = TransformersEngine(ModelConfig(path=str(folder))).generate(
        rows, range(len(rows)), sampling
    )
    assert [sample.token_ids for sample in quick] == [sample.token_ids for sample in plain]
    assert [sample.finish_reason for sample in quick] == [sample.finish_reason for sample in plain]


def test_weights_that_are_not_finite_do_not_spoil_the_trial(tmp_path):
    """The trial is of the folder's model: one that gives nan is refused when it samples, with
    its version.
    """
    model = load_model(tiny_model(tmp_path / "model", seed=1))
    with torch.no_grad():
        next(model.parameters()).fill_(torch.nan)
    assert not use_decoding(model)


def test_the_host_waits_once_a_token(monkeypatch):
    """Tokens and their log-probs come to the host in one copy."""
    model, rows, seen, copied = model_of("plain"), prompts(2, 2), [], []
    assert use_decoding(model)
    cpu = torch.Tensor.cpu
    monkeypatch.setattr(
        torch.Tensor, "cpu", lambda tensor: copied.append(tensor.shape) or cpu(tensor)
    )
    sampled(decode, model, rows, [5] * 4, seen)
    assert copied == [(2, len(left)) for left in seen]


def test_a_part_that_a_model_has_not_gets_no_attention():
    """Large Gemma 4 hear nothing: their config has null for sound."""
    text = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": 300}
    tower = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 16}
    config = CONFIG_MAPPING["gemma4"](text_config=text, vision_config=tower, audio_config=None)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    model.set_attn_implementation(attention_of_text(model, "eager"))
    assert model.config.text_config._attn_implementation == "eager"
    assert attention_of_text(model, None) == {"text_config": "eager", "vision_config": "sdpa"}
