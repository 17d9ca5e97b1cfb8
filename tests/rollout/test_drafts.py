"""Drafts of tokens change no sample, and fewer passes give the same rows where drafts are right."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from siirl_dask.config import Config, Engine, ModelConfig, RolloutConfig
from siirl_dask.errors import ConfigError
from siirl_dask.rollout import GenerationRequest, LocalQueue, Sampling, check_engine
from siirl_dask.rollout.transformers_engine.decoding import decode, use_decoding
from siirl_dask.rollout.transformers_engine.draft_decoding import decode_with_drafts
from siirl_dask.rollout.transformers_engine.drafts import BatchDrafts, EarlierResponses, NgramIndex
from siirl_dask.rollout.transformers_engine.engine import TransformersEngine
from siirl_dask.tasks.tiny_model import tiny_model, tiny_tokenizer
from siirl_dask.testing.engines import EngineTests
from siirl_dask.testing.reference_model import PROMPTS, assert_agrees_with_trainer, load_model
from tests.rollout.test_decoding import assert_same, model_of, prompts, sampled
from tests.settings import rollout_config

MODELS = {
    "qwen3": {"seed": 1},
    "llama, not tied": {"seed": 3, "family": "llama", "tied": False, "heads": 4, "kv_heads": 2},
}


@pytest.fixture(scope="module", params=list(MODELS))
def engines(request, tmp_path_factory):
    folder = str(tiny_model(tmp_path_factory.mktemp("model"), **MODELS[request.param]))
    model = ModelConfig(path=folder)
    return folder, TransformersEngine(model), TransformersEngine(model, draft_tokens=6)


class TestEngineThatDrafts(EngineTests):
    """It remembers nothing from call to call here: a log-prob's last bit depends on the tokens
    that are computed together, and the suite wants equal calls to give equal bits.
    """

    @classmethod
    def make_engine(cls, folder):
        engine = TransformersEngine(ModelConfig(path=str(folder)), draft_tokens=4)
        engine._earlier = EarlierResponses(most_tokens=0)
        return engine


def rounding(sampling):
    """Differences of log-probs that are rounding: that of logits is divided by the temperature."""
    return max(1e-5, 1e-6 / sampling.temperature) if sampling.temperature else 1e-5


def served(engine, requests):
    queue = LocalQueue(requests)
    engine.serve(queue)
    return queue.results()


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(max_tokens=40),
        Sampling(max_tokens=40, temperature=0.0),
        Sampling(max_tokens=40, temperature=0.02),  # rows that repeat themselves
        Sampling(max_tokens=40, temperature=0.3, top_k=20, top_p=0.9, min_p=0.01),
    ],
)
def test_rows_are_the_same_with_drafts_and_without(engines, sampling):
    """Prompts of many lengths, some of several rows, and responses of many lengths, some of them
    begun: in two steps, of which the second has the first one's responses for drafts.
    """
    _, plain, drafting = engines
    asked = [*PROMPTS, *PROMPTS[:3], [7, 8, 9] * 5]
    drafting.take_passes()
    for step in (1, 2):
        requests = [
            GenerationRequest(
                prompt,
                11 * step + row,
                replace(sampling, max_tokens=sampling.max_tokens - 3 * row),
                begun=min(len(prompt) - 1, row % 3),
            )
            for row, prompt in enumerate(asked)
        ]
        expected = served(plain, requests)
        for wanted, got in zip(expected, served(drafting, requests), strict=True):
            assert got.token_ids == wanted.token_ids
            assert got.finish_reason == wanted.finish_reason
            assert got.logprobs == pytest.approx(wanted.logprobs, abs=rounding(sampling))
        passes = drafting.take_passes()
        assert passes.tokens == sum(len(sample.token_ids) - 1 for sample in expected)
        assert passes.passes <= passes.tokens
    if sampling.temperature < 0.1:
        assert passes.tokens > 1.5 * passes.passes, "drafts are right where rows repeat themselves"
    assert drafting.take_passes().passes == 0
    assert plain.take_passes() is None


def test_what_was_sampled_before_is_drafted_again(tmp_path):
    """The same seeds under the same weights draw the same tokens: nearly all of them are taken
    from the earlier step, with no repetition in any row.
    """
    model = ModelConfig(path=str(tiny_model(tmp_path / "model", seed=1)))
    engine = TransformersEngine(model, draft_tokens=8)
    asked = [[row + 1, row + 2, row + 3] for row in range(5)]
    sampling = Sampling(max_tokens=30)
    first = engine.generate(asked, range(5), sampling)
    before = engine.take_passes()
    assert engine.generate(asked, range(5), sampling)[0].token_ids == first[0].token_ids
    again = engine.take_passes()
    assert again.tokens == before.tokens
    assert again.passes < before.passes / 3
    other = {
        name: weight.roll(1, 0) for name, weight in load_model(model.path).state_dict().items()
    }
    engine.load_weights(other.items(), 1)
    fresh = TransformersEngine(model)
    fresh.load_weights(other.items(), 1)
    samples = [engine.generate(asked, range(5), sampling) for engine in (engine, fresh)]
    assert [sample.token_ids for sample in samples[0]] == [
        sample.token_ids for sample in samples[1]
    ], "old drafts under new weights are no tokens"


@pytest.mark.parametrize("kind", ["windows", "soft caps"])
def test_attention_with_windows_and_soft_caps_is_that_of_the_loop_without_drafts(kind):
    model = model_of(kind)
    assert use_decoding(model)
    rows = prompts()
    limits = [5 + row % 9 for row in range(len(rows))]

    def drafting(model, rows, limits, ends, pad, choose):
        drafts = BatchDrafts(rows, [0] * len(rows), EarlierResponses(), 3)
        tokens, logprobs, _ = decode_with_drafts(
            model, rows, limits, ends, pad_token=pad, choose=choose, drafts=drafts
        )
        tables = [torch.zeros(len(rows), max(limits)) for _ in range(2)]
        for row in range(len(rows)):
            tables[0][row, : len(tokens[row])] = torch.tensor(tokens[row])
            tables[1][row, : len(tokens[row])] = torch.tensor(logprobs[row])
        return tables[0].long(), tables[1]

    assert_same(sampled(drafting, model, rows, limits), sampled(decode, model, rows, limits))


def test_logprobs_are_the_trainers_before_and_after_updates(engines):
    folder, _, drafting = engines
    assert_agrees_with_trainer(drafting, folder, after=(0, 1))


@given(
    st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=9), min_size=1, max_size=4),
    st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=6), max_size=5),
    st.integers(1, 4),
)
def test_a_draft_is_what_came_after_the_same_tokens_before(prompts, passes, most):
    earlier = EarlierResponses()
    drafts = BatchDrafts(prompts, [0] * len(prompts), earlier, most)
    rows = [list(prompt) for prompt in prompts]
    for tokens in passes:
        for row in range(len(rows)):
            draft = drafts.draft(row, room=3)
            assert len(draft) <= min(most, 3)
            assert drafts.draft(row, room=0) == []
            known = [other for other in rows if other[: len(prompts[row])] == prompts[row]]
            pairs = [
                (other[at - 2 : at], other[at : at + len(draft)])
                for other in known
                for at in range(2, len(other))
            ]
            assert not draft or (rows[row][-2:], draft) in pairs
            rows[row] += tokens
            drafts.add(row, tokens, drafted=len(draft))
    drafts.remember()
    for prompt, row in zip(prompts, rows, strict=True):
        kept = [list(one) for one in earlier.of(tuple(prompt))]
        assert row[max(0, len(prompt) - 3) :] in kept


def test_the_prompts_that_were_sampled_longest_ago_are_forgotten_first():
    earlier = EarlierResponses(most_tokens=10)
    for prompt in ((1,), (2,), (1,), (3,)):
        earlier.add(prompt, [0] * 3)
    assert [len(earlier.of((prompt,))) for prompt in (1, 2, 3)] == [2, 0, 1]
    index = NgramIndex()
    index.add(np.arange(9).tolist())
    assert index.after([3, 4], 2) == [5, 6]
    assert index.after([8, 9], 2) == []


def engine_of_states(folder):
    model = model_of("states")
    tokenizer = tiny_tokenizer()
    model.resize_token_embeddings(len(tokenizer))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return TransformersEngine(ModelConfig(path=str(folder)), draft_tokens=2)


def test_what_cannot_be_drafted_for_is_refused_by_name(tmp_path):
    with pytest.raises(ConfigError, match="draft_tokens=-1: expected at least 0"):
        RolloutConfig(draft_tokens=-1)
    with pytest.raises(ConfigError, match=r"router_replay=true with rollout.draft_tokens=2"):
        rollout_config(router_replay=True, draft_tokens=2)
    with pytest.raises(
        ConfigError, match=r"draft_tokens=2: .*MambaForCausalLM, has layers with states"
    ):
        engine_of_states(tmp_path / "states")
    path = str(tiny_model(tmp_path / "model"))
    options = {
        "model": ModelConfig(path=path),
        "rollout": RolloutConfig(engine=Engine.vllm, draft_tokens=4),
    }
    with pytest.raises(ConfigError, match=r"draft_tokens=4: the engine of .*vllm drafts no tokens"):
        check_engine(options, ["w0"], Config())
