"""Tests of engines that take new weights while they generate; a part of EngineTests."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
from transformers import PreTrainedModel

from siirl_dask.rollout import (
    Generation,
    GenerationRequest,
    LoadsInFlight,
    LocalQueue,
    RolloutEngine,
    Sampling,
)

_UPDATES = ((5, 7), (11, 8))
"""How often the engine has asked before weights arrive, and their version."""
_LIMITS = (2, 6, 12, 24)  # tokens of a row: some end before the first update, others after the last


@dataclass(slots=True)
class ScriptedWeights:
    """ArrivingWeights that arrive when the engine has asked so often."""

    engine: RolloutEngine
    models: Mapping[int, PreTrainedModel]
    """Models by the version that their weights have."""
    updates: list[tuple[int, int]]
    """How often the engine has asked before weights arrive, and their version; in order."""
    asked: int = 0

    def arrived(self) -> bool:
        """Return whether the next weights are there."""
        self.asked += 1
        if not self.updates:
            return False
        return self.asked >= self.updates[0][0]

    def load(self) -> None:
        """Load them."""
        _, version = self.updates.pop(0)
        self.engine.load_weights(self.models[version].named_parameters(), version)


class _FewAtATime(LocalQueue[GenerationRequest, Generation]):
    """Gives four requests at a time, as a queue whose requests come one after the other."""

    def next(self, limit: int, *, wait: bool) -> list[tuple[int, GenerationRequest]]:
        return super().next(min(4, limit), wait=wait)


class InFlightTests:
    """Tests of ``serve_in_flight``. They use the fixtures of EngineTests."""

    tolerance: float
    """Largest difference of log-probs from a plain forward pass in float32."""

    def test_rows_go_on_under_new_weights_as_continued_ones(
        self,
        engine: RolloutEngine,
        model: PreTrainedModel,
        other_model: PreTrainedModel,
    ) -> None:
        """Tokens and log-probs to the bit: the same rows are continued together."""
        models = {0: model, 7: other_model, 8: model}
        requests = _requests(16)
        found = self._served(engine, models, LocalQueue(requests))
        assert engine.version == 8
        spans = {tuple(dict.fromkeys(sample.versions or ())) for sample in found}
        assert {(0,), (0, 7), (0, 7, 8)} <= spans
        for version, weights in models.items():
            engine.load_weights(weights.named_parameters(), version)
            parts = [_part(sample, version) for sample in found]
            under_way = [at for at, (_, length) in enumerate(parts) if length]
            rest = [_rest(requests[at], found[at], parts[at][0]) for at in under_way]
            queue = LocalQueue[GenerationRequest, Generation](rest)
            engine.serve(queue)
            for at, expected in zip(under_way, queue.results(), strict=True):
                first, length = parts[at]
                got = found[at]
                assert got.token_ids[first : first + length] == expected.token_ids[:length]
                assert got.logprobs[first : first + length] == expected.logprobs[:length]
                if first + length == len(got.token_ids):
                    assert length == len(expected.token_ids)
                    assert got.finish_reason is expected.finish_reason

    def test_rows_that_begin_under_new_weights_have_none_of_older_ones(
        self,
        engine: RolloutEngine,
        model: PreTrainedModel,
        other_model: PreTrainedModel,
    ) -> None:
        models = {0: model, 7: other_model, 8: model}
        requests = _requests(24)
        found = self._served(engine, models, _FewAtATime(requests))
        assert (found[0].versions or [])[:2] == [0, 0]
        assert 0 not in (found[-1].versions or [0])
        for version, weights in models.items():
            engine.load_weights(weights.named_parameters(), version)
            for request, sample in zip(requests, found, strict=True):
                first, length = _part(sample, version)
                if not length:
                    continue
                rest = _rest(request, sample, first)
                queue = LocalQueue[GenerationRequest, Generation]([rest])
                engine.serve(queue)
                (expected,) = queue.results()
                assert sample.token_ids[first : first + length] == expected.token_ids[:length]
                assert sample.logprobs[first : first + length] == pytest.approx(
                    expected.logprobs[:length], abs=self.tolerance
                )

    def test_without_new_weights_a_row_is_what_it_is_otherwise(
        self, engine: RolloutEngine, model: PreTrainedModel
    ) -> None:
        requests = _requests(6)
        queue = LocalQueue[GenerationRequest, Generation](requests)
        engine.serve(queue)
        found = self._served(engine, {}, LocalQueue(requests), updates=())
        plain = [replace(sample, versions=None) for sample in found]
        assert plain == queue.results()
        assert {version for sample in found for version in sample.versions or ()} == {0}

    def _served(
        self,
        engine: RolloutEngine,
        models: Mapping[int, PreTrainedModel],
        queue: Any,
        updates: Sequence[tuple[int, int]] = _UPDATES,
    ) -> list[Generation]:
        """Return what an engine samples while weights arrive, its versions in order. Skips the test
        of one that takes none.
        """
        if not isinstance(engine, LoadsInFlight):
            pytest.skip("it takes new weights between its calls alone")
        weights = ScriptedWeights(engine, models, [*updates])
        engine.serve_in_flight(queue, weights)
        assert not weights.updates
        found: list[Generation] = queue.results()
        for sample in found:
            assert sample.versions is not None
            assert len(sample.versions) == len(sample.logprobs) == len(sample.token_ids)
            assert sample.versions == sorted(sample.versions)
        return found


def _part(sample: Generation, version: int) -> tuple[int, int]:
    """Return the place of the first token that ``version`` has sampled, and how many it has."""
    assert sample.versions is not None
    versions = sample.versions
    count = versions.count(version)
    return (versions.index(version) if count else 0), count


def _rest(request: GenerationRequest, sample: Generation, begun: int) -> GenerationRequest:
    """Return the request that continues a response after its first ``begun`` tokens."""
    left = request.sampling.max_tokens - begun
    return GenerationRequest(
        [*request.prompt, *sample.token_ids[:begun]],
        request.seed,
        replace(request.sampling, max_tokens=left),
        begun,
    )


def _requests(count: int) -> list[GenerationRequest]:
    """Return requests of 1 to 12 random tokens, for responses of several lengths."""
    numbers = random.Random(1)
    return [
        GenerationRequest(
            [numbers.randrange(256) for _ in range(numbers.randint(1, 12))],
            seed,
            Sampling(max_tokens=_LIMITS[seed % len(_LIMITS)]),
        )
        for seed in range(count)
    ]
