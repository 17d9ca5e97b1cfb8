"""Tests of steps that take the first groups of responses that are whole, in any order in which an
engine ends them: none is lost, none is trained twice or too old, and a ledger gives the same rows.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field, replace
from functools import partial

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from siirl_storage import commit_parts, stage_part

from siirl_dask.config import RolloutConfig
from siirl_dask.context import Context, Device, Rank
from siirl_dask.errors import ConfigError, DataError
from siirl_dask.nodes import generate
from siirl_dask.nodes.continued.response_parts import PartialSample, PartsQueue, part_length
from siirl_dask.nodes.continued.step_rules import BudgetRule
from siirl_dask.planner.contract import contract_of
from siirl_dask.rollout import FinishReason, Generation, GenerationRequest, Sampling
from siirl_dask.rollout.requests import Sampled
from siirl_dask.tables.stored_rows import read_kept_rows, step_folder
from tests.nodes.test_partial_rollout import Counting, prompts

N, LENGTH, PART = 2, 64, 16


@dataclass
class AnyOrder:
    """An engine of some rows, which ends what is under way in an order of its own. The tokens of a
    response depend on its seed, their places and the weights.
    """

    order: random.Random
    rows: int = 3
    version: int = 0
    longest: int = 0
    """Most tokens of a request."""
    served: list = field(default_factory=list)

    tokenizer = Counting.tokenizer

    def serve(self, queue):
        running = []
        while True:
            running += queue.next(self.rows - len(running), wait=not running)
            if not running:
                return
            ticket, asked = running.pop(self.order.randrange(len(running)))
            self.served.append((asked.seed, asked.begun))
            queue.complete(ticket, self._sample(asked))

    def _sample(self, asked):
        assert asked.sampling.max_tokens <= PART
        tokens = []
        for place in range(asked.begun, asked.begun + asked.sampling.max_tokens):
            draw = random.Random(f"{asked.seed} {place} {self.version}").randrange(24)
            tokens.append(draw)
            if not draw:
                break
        reason = FinishReason.LENGTH if tokens[-1] else FinishReason.STOP
        return Generation(tokens, [-float(draw) / 3 for draw in tokens], reason)


class Sampler:
    """A worker that samples some prompts in each step, and commits the rows that it makes."""

    def __init__(self, folder, *, order=0, rows=3, window=1, staleness=2, ledger=None, **changes):
        self.engine = AnyOrder(random.Random(order), rows)
        self.state = {}
        self.folder = folder
        self.metrics = []
        self.rollout = RolloutConfig(
            n=N,
            max_response_length=LENGTH,
            window=window,
            max_staleness=staleness,
            steps_ahead=0,
            ledger=ledger,
            **changes,
        )

    def context(self, step, *, drain=False):
        how = {"rank": Rank(), "device": Device("w"), "resource": self.engine}
        return Context(step=step, run_seed=0, state=self.state, drain=drain, **how)

    def step(self, step, count, *, drain=False):
        ctx = self.context(step, drain=drain)
        self.engine.version = step - 1
        rows = generate(ctx, prompts(step, count), rollout=self.rollout)
        folder = step_folder(str(self.folder), "rollouts", step)
        commit_parts(folder, 1, [stage_part(folder, 1, 0, rows)])
        self.metrics.append({name: metric.value for name, metric in ctx.metrics.items()})
        return rows

    def steps(self, count, steps):
        return [self.step(step, count, drain=step == steps) for step in range(1, steps + 1)]

    def restarted(self, step):
        """The worker of another process, with what was stored with the rows of this step."""
        carries = contract_of(partial(generate, rollout=self.rollout)).carries
        packed = carries.pack(self.context(step), rollout=self.rollout)
        folder = str(self.folder / f"kept-{step}")
        commit_parts(folder, 1, [stage_part(folder, 1, 0, packed)])
        later = Sampler(self.folder, order=step)
        later.rollout = self.rollout
        carries.unpack(
            later.context(step), read_kept_rows(folder, 0, 1, 2**20), rollout=self.rollout
        )
        return later


def check(made, size, window, staleness):
    """Each prompt once, as many groups as a step has to take, none older than it may be."""
    if len(made) > 1:
        groups = [rows.num_rows // N for rows in made]
        assert groups == [size - window, *[size] * (len(made) - 2), size + window]
    seeds = Counter(seed for rows in made for seed in rows["sampling_seed"].to_pylist())
    assert set(seeds.values()) == {1}
    assert len(seeds) == size * len(made) * N
    for step, rows in enumerate(made, 1):
        assert set(Counter(rows["group_id"].to_pylist()).values()) == {N}
        for row in rows.to_pylist():
            assert step - 1 - min(row["token_versions"]) <= staleness
            assert row["weights_version"] == min(row["token_versions"])
            assert len(row["token_versions"]) == len(row["response_ids"])
            ended = row["finish_reason"] == "stop"
            assert ended == (row["response_ids"][-1] == 0)
            assert ended or len(row["response_ids"]) == LENGTH


@settings(max_examples=40, deadline=None)
@given(
    sizes=st.integers(2, 5).flatmap(
        lambda size: st.tuples(st.just(size), st.integers(1, size - 1))
    ),
    steps=st.integers(1, 4),
    staleness=st.integers(1, 3),
    rows=st.integers(1, 7),
    order=st.integers(0, 999),
    again=st.tuples(st.integers(0, 999), st.integers(1, 7)),
)
def test_in_any_order_no_group_is_lost_or_too_old_and_a_ledger_gives_the_same_rows(
    tmp_path_factory, sizes, steps, staleness, rows, order, again
):
    size, window = sizes
    folder = tmp_path_factory.mktemp("run")
    how = {"window": window, "staleness": staleness}
    first = Sampler(folder / "first", order=order, rows=rows, **how)
    made = first.steps(size, steps)
    check(made, size, window, staleness)
    assert not first.state

    ledger = str(folder / "first" / "rollouts")
    repeated = Sampler(folder / "again", order=again[0], rows=again[1], ledger=ledger, **how)
    for expected, got in zip(made, repeated.steps(size, steps), strict=True):
        assert got.equals(expected)
    assert sum(metrics["rollout/dropped_groups"] for metrics in repeated.metrics) == 0


@settings(max_examples=15, deadline=None)
@given(order=st.integers(0, 999), stopped=st.integers(1, 3), again=st.integers(1, 3))
def test_a_worker_that_starts_again_goes_on_with_the_tokens_that_were_stored(
    tmp_path_factory, order, stopped, again
):
    folder = tmp_path_factory.mktemp("run")
    first = Sampler(folder / "first", order=order)
    made = [first.step(step, 3) for step in range(1, stopped + 1)]
    later = first.restarted(stopped)
    made += [later.step(step, 3, drain=step == 4) for step in range(stopped + 1, 5)]
    check(made, 3, 1, 2)
    own = {seed for rows in made[:stopped] for seed in rows["sampling_seed"].to_pylist()}
    assert not {seed for seed, _ in later.engine.served} & own

    ledger = str(folder / "first" / "rollouts")
    repeated = Sampler(folder / "again", order=order + 1, ledger=ledger)
    for step, expected in enumerate(made, 1):
        assert repeated.step(step, 3, drain=step == 4).equals(expected)
        if step == again:  # stopped as well, and it goes on in another process
            repeated = repeated.restarted(step)


class LongFirst(AnyOrder):
    """An engine in which the responses to one prompt never end before their limit, and whose part
    of them is always the last to be there.
    """

    held = 10

    def serve(self, queue):
        running = []
        while True:
            running += queue.next(self.rows - len(running), wait=not running)
            if not running:
                return
            running.sort(key=lambda one: one[1].prompt[0] == self.held)
            ticket, asked = running.pop(0)
            self.served.append((asked.seed, asked.begun))
            queue.complete(ticket, self._sample(asked))

    def _sample(self, asked):
        tokens = [1] * asked.sampling.max_tokens
        if asked.prompt[0] == self.held:
            return Generation(tokens, [-1.0] * len(tokens), FinishReason.LENGTH)
        return Generation([1, 0], [-1.0, -1.0], FinishReason.STOP)


def test_a_long_group_is_passed_dropped_when_too_old_and_trained_in_the_drain(tmp_path):
    sampler = Sampler(tmp_path, staleness=1)
    sampler.engine = LongFirst(random.Random(0), rows=4)
    rows = [sampler.step(step, 3) for step in (1, 2, 3, 4)]
    groups = [{tuple(prompt) for prompt in table["prompt_ids"].to_pylist()} for table in rows]
    assert [len(found) for found in groups] == [2, 3, 3, 3]
    # begun at weights 0, and again at weights 2, and too old for the steps after
    assert [metrics["rollout/dropped_groups"] for metrics in sampler.metrics] == [0, 1, 0, 1]
    assert all((10,) not in found for found in groups)
    # in no step was more than a part of a held response sampled that the step did not need
    held = sampler.engine.served
    begun_at = Counter(begun for seed, begun in held if begun)
    assert set(begun_at) <= {16}
    drained = sampler.step(5, 3, drain=True)
    versions = {tuple(row["prompt_ids"]): row["token_versions"] for row in drained.to_pylist()}
    assert versions[10,] == [4] * LENGTH
    again = Sampler(tmp_path / "again", staleness=1, ledger=str(tmp_path / "rollouts"))
    again.engine = LongFirst(random.Random(0), rows=2)
    for step, expected in enumerate([*rows, drained], 1):
        assert again.step(step, 3, drain=step == 5).equals(expected), step


def test_the_rows_under_way_go_on_before_others_begin():
    request = GenerationRequest([1], 0, Sampling(max_tokens=64))
    samples = [PartialSample(replace(request, seed=seed)) for seed in range(4)]
    queue = PartsQueue(
        samples=samples,
        order=[2, 0, 1, 3],
        rule=BudgetRule([0, 1, 2, 3], None),
        length=part_length(64),
        version=lambda: 7,
        on_progress=lambda done, total: None,
    )
    first = queue.next(2, wait=True)
    assert [request.seed for _, request in first] == [2, 0]
    for ticket, _ in reversed(first):
        queue.complete(ticket, Sampled(Generation([1] * 16, [0.0] * 16, FinishReason.LENGTH), "w"))
    assert [request.seed for _, request in queue.next(3, wait=True)] == [2, 0, 1]
    assert not queue.ended()
    assert samples[2].versions == [7] * 16


def test_a_ledger_of_other_tokens_is_refused(tmp_path):
    first = Sampler(tmp_path / "first")
    made = first.steps(3, 2)
    ledger = str(tmp_path / "first" / "rollouts")
    other = Sampler(tmp_path / "other", ledger=ledger)
    other.engine._sample = lambda asked: Generation([5, 0], [-1.0, -1.0], FinishReason.STOP)
    with pytest.raises(DataError, match=r"tokens there, and other ones here"):
        other.steps(3, 2)
    fewer = Sampler(tmp_path / "fewer", ledger=ledger)
    with pytest.raises(DataError, match=rf"has {made[0].num_rows} rows of step 1, of which"):
        fewer.steps(1, 2)


def test_a_window_has_no_routes_of_one_version_and_says_so():
    with pytest.raises(ConfigError, match=r"router_replay=true with rollout\.window=1"):
        RolloutConfig(window=1, max_staleness=1, router_replay=True)


def test_an_empty_worker_takes_nothing(tmp_path):
    sampler = Sampler(tmp_path)
    assert sampler.step(1, 0).num_rows == 0
    assert isinstance(sampler.step(2, 2, drain=True), pa.Table)
