"""The conformance suite of rollout engines: inherit it, and give it an engine.

    class TestMyEngine(EngineTests):
        @classmethod
        def make_engine(cls, folder: Path) -> RolloutEngine:
            return MyEngine(folder)

pytest collects the inherited tests; ``folder`` is a tiny random model in float32.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close
from transformers import PreTrainedModel

from siirl_dask.context import Sleeps
from siirl_dask.errors import ConfigError
from siirl_dask.models.adapters import WEIGHT, A, B
from siirl_dask.rollout import (
    FinishReason,
    Generation,
    GenerationRequest,
    LocalQueue,
    RolloutEngine,
    Sampling,
    TakesAdapters,
)
from siirl_dask.tasks.tiny_model import CHAT_TEMPLATE, tiny_model
from siirl_dask.tasks.vocabulary import VOCABULARY
from siirl_dask.testing.in_flight import InFlightTests
from siirl_dask.testing.reference_model import load_model, response_logprobs, response_scores
from siirl_dask.testing.weight_streams import WeightStreamTests

# A random model's next token is nearly uniform; at this temperature the likeliest of 264 tokens has
# about 0.1.
_SHARP = 0.06


class EngineTests(WeightStreamTests, InFlightTests):
    """Tests of an engine, which is built once per class."""

    tolerance = 1e-4
    """Largest difference of log-probs from a plain forward pass in float32."""
    takes_min_p = True
    """Whether the engine knows ``Sampling.min_p``; one that does not must refuse it."""

    @classmethod
    def make_engine(cls, folder: Path) -> RolloutEngine:
        """Build the engine to be tested, in float32, from a Hugging Face folder."""
        raise NotImplementedError

    @pytest.fixture(scope="class")
    @classmethod
    def folder(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        """A tiny model with random weights and a chat template."""
        return tiny_model(
            tmp_path_factory.mktemp("engine") / "model", seed=1, chat_template=CHAT_TEMPLATE
        )

    @pytest.fixture(scope="class")
    @classmethod
    def model(cls, folder: Path) -> PreTrainedModel:
        """The folder's model, for a plain forward pass."""
        return load_model(folder)

    @pytest.fixture(scope="class")
    @classmethod
    def other_model(cls, tmp_path_factory: pytest.TempPathFactory) -> PreTrainedModel:
        """A model of the same shapes with other weights."""
        return load_model(tiny_model(tmp_path_factory.mktemp("engine") / "other", seed=2))

    @pytest.fixture(scope="class")
    @classmethod
    def built_engine(cls, folder: Path) -> Iterator[RolloutEngine]:
        """The engine of the class, with whatever weights the last test left."""
        engine = cls.make_engine(folder)
        yield engine
        engine.close()

    @pytest.fixture
    def engine(self, built_engine: RolloutEngine, model: PreTrainedModel) -> RolloutEngine:
        """The shared engine with the weights of the folder. Building one may take seconds."""
        if built_engine.version != 0:
            built_engine.load_weights(model.named_parameters(), 0)
        return built_engine

    def test_a_new_engine_has_weights_of_version_0(self, engine: RolloutEngine) -> None:
        assert engine.version == 0

    def test_no_prompts_give_no_samples(self, engine: RolloutEngine) -> None:
        assert engine.generate([], [], Sampling(max_tokens=4)) == []

    def test_a_prompt_without_tokens_is_refused(self, engine: RolloutEngine) -> None:
        with pytest.raises(ValueError, match="no tokens"):
            engine.generate([[1, 2], []], [0, 1], Sampling(max_tokens=4))

    def test_a_sample_does_not_depend_on_the_rows_beside_it(self, engine: RolloutEngine) -> None:
        prompts = _prompts(12)
        seeds = list(range(100, 112))
        sampling = Sampling(max_tokens=8, temperature=_SHARP)
        together = engine.generate(prompts, seeds, sampling)
        reversed_order = engine.generate(prompts[::-1], seeds[::-1], sampling)[::-1]
        alone = [
            engine.generate([prompt], [seed], sampling)[0]
            for prompt, seed in zip(prompts, seeds, strict=True)
        ]
        self._assert_same(reversed_order, together)
        self._assert_same(alone, together)

    def test_a_longer_limit_keeps_the_first_tokens(self, engine: RolloutEngine) -> None:
        prompts = _prompts(4)
        seeds = [1, 2, 3, 4]
        short = engine.generate(prompts, seeds, Sampling(max_tokens=3, temperature=_SHARP))
        long = engine.generate(prompts, seeds, Sampling(max_tokens=9, temperature=_SHARP))
        assert [sample.token_ids for sample in short] == [sample.token_ids[:3] for sample in long]

    def test_other_seeds_give_other_samples(self, engine: RolloutEngine) -> None:
        samples = engine.generate([[5, 6, 7]] * 8, list(range(8)), Sampling(max_tokens=8))
        assert len({tuple(sample.token_ids) for sample in samples}) == 8

    def test_samples_follow_the_model(self, engine: RolloutEngine, model: PreTrainedModel) -> None:
        prompt = [5, 6, 7]
        count = 2000
        samples = engine.generate(
            [prompt] * count, list(range(count)), Sampling(max_tokens=1, temperature=_SHARP)
        )
        drawn = (
            torch.bincount(
                torch.tensor([sample.token_ids[0] for sample in samples]), minlength=VOCABULARY
            )
            / count
        )
        with torch.no_grad():
            expected = response_scores(model, prompt, [0], _SHARP)[0].exp()
        expected_difference = (2 * expected * (1 - expected) / (torch.pi * count)).sqrt().sum()
        assert float((drawn - expected).abs().sum()) < 1.5 * float(expected_difference)

    def test_logprobs_are_those_before_top_k_top_p_and_min_p(
        self, engine: RolloutEngine, model: PreTrainedModel
    ) -> None:
        for sampling in (
            Sampling(max_tokens=6, temperature=0.7),
            Sampling(max_tokens=6, temperature=_SHARP, top_k=5),
            Sampling(max_tokens=6, temperature=_SHARP, top_p=0.5),
            *([Sampling(max_tokens=6, temperature=_SHARP, min_p=0.5)] if self.takes_min_p else []),
        ):
            prompts = _prompts(6)
            samples = engine.generate(prompts, list(range(6)), sampling)
            self._assert_logprobs(model, prompts, samples, sampling.temperature)

    def test_top_k_top_p_and_min_p_leave_only_the_likeliest(
        self, engine: RolloutEngine, model: PreTrainedModel
    ) -> None:
        prompt = [5, 6, 7]
        with torch.no_grad():
            likeliest = response_scores(model, prompt, [0], _SHARP)[0].exp().sort(descending=True)
        nucleus = int((likeliest.values.cumsum(0) < 0.5).sum()) + 1
        near = int((likeliest.values >= 0.5 * likeliest.values[0]).sum())
        for sampling, count in (
            (Sampling(max_tokens=1, temperature=_SHARP, top_k=3), 3),
            (Sampling(max_tokens=1, temperature=_SHARP, top_p=0.5), nucleus),
            *(
                [(Sampling(max_tokens=1, temperature=_SHARP, min_p=0.5), near)]
                if self.takes_min_p
                else []
            ),
        ):
            samples = engine.generate([prompt] * 200, list(range(200)), sampling)
            assert {sample.token_ids[0] for sample in samples} <= set(
                likeliest.indices[:count].tolist()
            )

    def test_min_p_is_taken_or_refused(self, engine: RolloutEngine) -> None:
        sampling = Sampling(max_tokens=1, min_p=0.5)
        if self.takes_min_p:
            assert engine.generate([[5, 6]], [1], sampling)
            return
        with pytest.raises(ConfigError, match=r"min_p=0\.5"):
            engine.generate([[5, 6]], [1], sampling)

    def test_a_sample_ends_at_its_end_token_or_at_the_limit(
        self, engine: RolloutEngine, model: PreTrainedModel
    ) -> None:
        end = model.generation_config.eos_token_id
        samples = engine.generate(_prompts(48), list(range(48)), Sampling(max_tokens=16))
        for sample in samples:
            assert len(sample.logprobs) == len(sample.token_ids)
            if sample.finish_reason is FinishReason.STOP:
                assert sample.token_ids.index(end) == len(sample.token_ids) - 1
            else:
                assert end not in sample.token_ids
                assert len(sample.token_ids) == 16
        assert {sample.finish_reason for sample in samples} == {
            FinishReason.STOP,
            FinishReason.LENGTH,
        }

    def test_a_stop_token_of_the_user_only_cuts_samples(self, engine: RolloutEngine) -> None:
        prompts = _prompts(32)
        free = Sampling(max_tokens=12)
        samples = engine.generate(prompts, list(range(32)), free)
        stop = max(token for sample in samples for token in sample.token_ids[:-1])
        stopped = engine.generate(prompts, list(range(32)), replace(free, stop_token_ids=(stop,)))
        for sample, cut in zip(samples, stopped, strict=True):
            length = (
                sample.token_ids.index(stop) + 1
                if stop in sample.token_ids
                else len(sample.token_ids)
            )
            assert cut.token_ids == sample.token_ids[:length]
            assert cut.finish_reason is (
                FinishReason.STOP if stop in sample.token_ids else sample.finish_reason
            )
        assert sum(len(cut.token_ids) for cut in stopped) < sum(
            len(sample.token_ids) for sample in samples
        )

    def test_greedy_takes_the_likeliest_token_with_any_seed(
        self, engine: RolloutEngine, model: PreTrainedModel
    ) -> None:
        prompts = _prompts(6)
        greedy = Sampling(max_tokens=6, temperature=0.0)
        samples = engine.generate(prompts, [0] * 6, greedy)
        self._assert_same(engine.generate(prompts, [1] * 6, greedy), samples)
        self._assert_logprobs(model, prompts, samples, temperature=1.0)
        for prompt, sample in zip(prompts, samples, strict=True):
            scores = response_scores(model, prompt, sample.token_ids)
            assert scores.argmax(-1).tolist() == sample.token_ids

    def test_new_weights_are_used(
        self,
        engine: RolloutEngine,
        model: PreTrainedModel,
        other_model: PreTrainedModel,
    ) -> None:
        prompts = _prompts(6)
        sampling = Sampling(max_tokens=6)
        before = engine.generate(prompts, list(range(6)), sampling)
        engine.load_weights(iter(list(other_model.named_parameters())), 7)
        assert engine.version == 7
        self._assert_logprobs(
            other_model, prompts, engine.generate(prompts, list(range(6)), sampling), 1.0
        )
        engine.load_weights(model.named_parameters(), 8)
        self._assert_same(engine.generate(prompts, list(range(6)), sampling), before)

    def test_a_sleeping_engine_wakes_to_generate_and_to_load_weights(
        self, engine: RolloutEngine, model: PreTrainedModel, other_model: PreTrainedModel
    ) -> None:
        if not isinstance(engine, Sleeps):
            pytest.skip("it never sleeps")
        prompts = _prompts(6)
        sampling = Sampling(max_tokens=6)
        before = engine.generate(prompts, list(range(6)), sampling)
        engine.sleep()
        engine.sleep()
        self._assert_same(engine.generate(prompts, list(range(6)), sampling), before)
        engine.sleep(weights_follow=True)
        engine.load_weights(other_model.named_parameters(), 1)
        self._assert_logprobs(
            other_model, prompts, engine.generate(prompts, list(range(6)), sampling), 1.0
        )
        engine.load_weights(model.named_parameters(), 2)
        self._assert_same(engine.generate(prompts, list(range(6)), sampling), before)

    def test_adapters_change_the_folders_weights_and_not_those_of_now(
        self, engine: RolloutEngine, model: PreTrainedModel, other_model: PreTrainedModel
    ) -> None:
        if not isinstance(engine, TakesAdapters):
            pytest.skip("it takes whole weights alone")
        prompts = _prompts(6)
        sampling = Sampling(max_tokens=6)
        engine.load_weights(model.named_parameters(), 1)
        before = engine.generate(prompts, list(range(6)), sampling)
        adapted = deepcopy(model)
        adapters = dict(_adapters(model))
        for name in adapters:
            if name.endswith(A):
                layer = name.removesuffix(A)
                weight = adapted.get_parameter(layer + WEIGHT)
                weight.data += 0.5 * adapters[layer + B] @ adapters[name]
        engine.load_weights(other_model.named_parameters(), 1)
        for version in (2, 3):
            if isinstance(engine, Sleeps):
                engine.sleep(weights_follow=True)
            engine.load_adapters(adapters.items(), 0.5, version)
            assert engine.version == version
            self._assert_logprobs(
                adapted, prompts, engine.generate(prompts, list(range(6)), sampling), 1.0
            )
        engine.load_weights(model.named_parameters(), 4)
        self._assert_same(engine.generate(prompts, list(range(6)), sampling), before)

    def test_requests_with_different_parameters_do_not_affect_each_other(
        self, engine: RolloutEngine
    ) -> None:
        samplings = [
            Sampling(max_tokens=length, temperature=heat)
            for length in (1, 5)
            for heat in (0.0, 0.7, _SHARP)
        ]
        requests = [
            GenerationRequest(prompt, 3, own)
            for prompt, own in zip(_prompts(6), samplings, strict=True)
        ]
        queue = LocalQueue[GenerationRequest, Generation](requests)
        engine.serve(queue)
        for request, sample in zip(requests, queue.results(), strict=True):
            (alone,) = engine.generate([request.prompt], [request.seed], request.sampling)
            self._assert_same([sample], [alone])

    @pytest.mark.parametrize("heat", [0.0, _SHARP, 1.0])
    def test_a_response_that_was_interrupted_continues_unchanged(
        self, engine: RolloutEngine, heat: float
    ) -> None:
        prompts = _prompts(6)
        whole = Sampling(max_tokens=9, temperature=heat)
        expected = engine.generate(prompts, list(range(6)), whole)
        started = engine.generate(prompts, list(range(6)), replace(whole, max_tokens=4))
        rest = [
            GenerationRequest(
                [*prompt, *start.token_ids],
                seed,
                replace(whole, max_tokens=5),
                len(start.token_ids),
            )
            for seed, (prompt, start) in enumerate(zip(prompts, started, strict=True))
            if start.finish_reason is FinishReason.LENGTH
        ]
        assert rest
        queue = LocalQueue[GenerationRequest, Generation](rest)
        engine.serve(queue)
        for request, sample in zip(rest, queue.results(), strict=True):
            wanted = expected[request.seed]
            assert [*started[request.seed].token_ids, *sample.token_ids] == wanted.token_ids
            assert sample.logprobs == pytest.approx(wanted.logprobs[4:], abs=1e-4)
            assert sample.finish_reason is wanted.finish_reason

    @pytest.mark.parametrize("wrong", ["missing", "unknown", "misshaped"])
    def test_weights_that_do_not_fit_are_refused_by_name(
        self,
        engine: RolloutEngine,
        model: PreTrainedModel,
        other_model: PreTrainedModel,
        wrong: str,
    ) -> None:
        engine.load_weights(model.named_parameters(), 3)
        prompts = _prompts(6)
        sampling = Sampling(max_tokens=6)
        before = engine.generate(prompts, list(range(6)), sampling)
        weights: dict[str, Tensor] = dict(other_model.named_parameters())
        name = "model.norm.weight"
        if wrong == "missing":
            del weights[name]
        elif wrong == "unknown":
            name = "model.unheard_of.weight"
            weights[name] = torch.zeros(3)
        else:
            weights[name] = torch.zeros(3)
        with pytest.raises(ValueError, match=name):
            engine.load_weights(weights.items(), 4)
        assert engine.version == 3
        self._assert_same(engine.generate(prompts, list(range(6)), sampling), before)

    def test_new_weights_empty_the_prefix_cache(
        self, engine: RolloutEngine, model: PreTrainedModel, other_model: PreTrainedModel
    ) -> None:
        prompts = [[number % 256 for number in range(300)]] * 3
        sampling = Sampling(max_tokens=4)
        for weights, version in ((model, 1), (other_model, 2)):
            engine.load_weights(weights.named_parameters(), version)
            self._assert_logprobs(
                weights, prompts, engine.generate(prompts, [1, 2, 3], sampling), 1.0
            )

    @pytest.mark.parametrize(
        "text", ["Sort: 2 9 =", "  two  spaces\n\tand a tab ", "é ß 漢字 🙂", ""]
    )
    def test_the_tokenizer_gives_back_the_text(self, engine: RolloutEngine, text: str) -> None:
        assert engine.tokenizer.decode(engine.tokenizer.encode(text), skip_special=False) == text

    def test_the_tokenizer_leaves_special_tokens_out_when_asked(
        self, engine: RolloutEngine, model: PreTrainedModel
    ) -> None:
        tokens = [*engine.tokenizer.encode("ab"), model.generation_config.eos_token_id]
        assert engine.tokenizer.decode(tokens, skip_special=True) == "ab"
        assert engine.tokenizer.plain_text(tokens) is None, "the same"
        assert engine.tokenizer.decode(tokens, skip_special=False) != "ab"

    def test_messages_go_through_the_chat_template(self, engine: RolloutEngine) -> None:
        tokens = engine.tokenizer.encode([{"role": "user", "content": "hi"}])
        assert engine.tokenizer.decode(tokens, skip_special=False) == "user: hi\nassistant:"

    def _assert_same(self, samples: list[Generation], expected: list[Generation]) -> None:
        assert [sample.token_ids for sample in samples] == [sample.token_ids for sample in expected]
        assert [sample.finish_reason for sample in samples] == [
            sample.finish_reason for sample in expected
        ]
        for sample, other in zip(samples, expected, strict=True):
            assert_close(
                torch.tensor(sample.logprobs),
                torch.tensor(other.logprobs),
                atol=self.tolerance,
                rtol=0,
            )

    def _assert_logprobs(
        self,
        model: PreTrainedModel,
        prompts: list[list[int]],
        samples: list[Generation],
        temperature: float,
    ) -> None:
        for prompt, sample in zip(prompts, samples, strict=True):
            with torch.no_grad():
                expected = response_logprobs(model, prompt, sample.token_ids, temperature)
            assert_close(torch.tensor(sample.logprobs), expected, atol=self.tolerance, rtol=0)


def _adapters(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Yield adapters of rank 2 for some linear layers of each kind, large enough to change what
    is sampled.
    """
    numbers = torch.Generator().manual_seed(7)
    for name, weight in model.named_parameters():
        if name.endswith(
            ("0.self_attn.q_proj.weight", "0.self_attn.o_proj.weight", "1.mlp.down_proj.weight")
        ):
            for end, shape in ((A, (2, weight.shape[1])), (B, (weight.shape[0], 2))):
                yield name.removesuffix(WEIGHT) + end, torch.randn(shape, generator=numbers) * 0.3


def _prompts(count: int) -> list[list[int]]:
    """Return prompts of 1 to 12 random tokens."""
    numbers = random.Random(0)
    return [[numbers.randrange(256) for _ in range(numbers.randint(1, 12))] for _ in range(count)]
