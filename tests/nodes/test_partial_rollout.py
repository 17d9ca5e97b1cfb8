"""Tests of responses that are generated over several steps: none is lost, and none differs."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from siirl_storage import commit_parts, stage_part

from siirl_dask.config import RolloutConfig
from siirl_dask.context import Context, Device, Rank
from siirl_dask.errors import ConfigError
from siirl_dask.nodes import generate
from siirl_dask.planner import Node
from siirl_dask.planner.contract import contract_of
from siirl_dask.rollout import FinishReason, Generation
from siirl_dask.schema import TYPES
from siirl_dask.tables.stored_rows import read_kept_rows


@dataclass
class Counting:
    """Token t of a row is t, until the row's number says that it ends; the log-prob says which
    weights sampled it.
    """

    version: int = 0
    served: list = field(default_factory=list)

    class tokenizer:
        @staticmethod
        def decode(token_ids, *, skip_special):
            return " ".join(map(str, token_ids))

        @staticmethod
        def plain_text(token_ids):
            return None

    def serve(self, queue):
        while taken := queue.next(3, wait=True):
            for ticket, asked in taken:
                queue.complete(ticket, self._go_on(asked))

    def _go_on(self, asked):
        self.served.append(asked.sampling.max_tokens)
        ends = asked.seed % 7 + asked.prompt[0] % 5
        tokens = list(range(asked.begun, min(ends + 1, asked.begun + asked.sampling.max_tokens)))
        stopped = bool(tokens) and tokens[-1] == ends
        reason = FinishReason.STOP if stopped else FinishReason.LENGTH
        return Generation(tokens, [-float(self.version)] * len(tokens), reason)


def prompts(step, count=3):
    ids = pa.array(range(count), pa.int64())
    given = {
        "row_id": ids,
        "group_id": ids,
        "tokens": ids,
        "prompt_ids": [[10 * step + i] for i in range(count)],
    }
    return pa.table({name: pa.array(values, TYPES[name]) for name, values in given.items()})


def context(engine, state, step, *, drain=False):
    return Context(
        step=step,
        run_seed=0,
        rank=Rank(),
        device=Device("w"),
        resource=engine,
        state=state,
        drain=drain,
    )


def run(rollout, steps):
    """Return each step's rows; the last step drains."""
    engine, kept, rows = Counting(), {}, []
    for step in range(1, steps + 1):
        ctx = context(engine, kept, step, drain=step == steps)
        rows.append(generate(ctx, prompts(step), rollout=rollout).to_pylist())
        engine.version = step
    assert not kept
    return rows, engine


def rollout(**changes):
    return RolloutConfig(n=2, max_response_length=9, max_staleness=8, **changes)


@settings(max_examples=30, deadline=None)
@given(budget=st.integers(1, 9), steps=st.integers(1, 5))
def test_every_response_equals_one_that_was_generated_at_once(budget, steps):
    parts, _ = run(rollout(partial=True, max_tokens_per_step=budget), steps)
    whole, _ = run(rollout(), steps)
    expected = {tuple(row["prompt_ids"]): [] for step in whole for row in step}
    found = {prompt: [] for prompt in expected}
    for rows, into in ((whole, expected), (parts, found)):
        for row in (row for step in rows for row in step):
            into[tuple(row["prompt_ids"])].append(
                (row["row_id"] % 2**32, row["response_ids"], row["finish_reason"])
            )
    assert found == expected


@pytest.mark.parametrize("workers", [1, 2])
def test_samples_that_were_stored_between_steps_go_on_as_if_they_had_stayed(tmp_path, workers):
    """Whichever worker gets them: each has whole groups, and all of them have each group once."""
    given_ = rollout(partial=True, max_tokens_per_step=2)
    ctxs = [context(Counting(), {}, 1) for _ in range(workers)]
    straight = [generate(ctx, prompts(1, 5), rollout=given_).num_rows for ctx in ctxs[:1]]
    carries = contract_of(partial(generate, rollout=given_)).carries
    packed = carries.pack(ctxs[0], rollout=given_)
    assert straight[0] + packed.num_rows == 10
    folder = str(tmp_path / "kept")
    commit_parts(folder, 1, [stage_part(folder, 1, 0, packed)])
    later = [context(Counting(1), {}, 2, drain=True) for _ in range(workers)]
    for index, ctx in enumerate(later):
        rows = read_kept_rows(folder, index, workers, 2**20)
        carries.unpack(ctx, rows, rollout=given_)
    ended = [
        row for ctx in later for row in generate(ctx, prompts(2, 0), rollout=given_).to_pylist()
    ]
    stayed = generate(
        replace(ctxs[0], resource=Counting(1), step=2, drain=True), prompts(2, 0), rollout=given_
    )
    assert sorted(ended, key=lambda row: row["row_id"]) == stayed.sort_by("row_id").to_pylist()
    assert len(ended) == packed.num_rows


def test_nothing_kept_is_stored_as_no_rows(tmp_path):
    given_ = rollout(partial=True, max_tokens_per_step=9)
    ctx = context(Counting(), {}, 1)
    generate(ctx, prompts(1), rollout=given_)
    packed = contract_of(partial(generate, rollout=given_)).carries.pack(ctx, rollout=given_)
    folder = str(tmp_path / "kept")
    commit_parts(folder, 1, [stage_part(folder, 1, 0, packed)])
    assert [read_kept_rows(folder, index, 2, 2**20) for index in range(2)] == [None, None]


@settings(max_examples=30, deadline=None)
@given(budget=st.integers(1, 9))
def test_a_group_comes_when_all_its_samples_have_ended(budget):
    given_ = rollout(partial=True, max_tokens_per_step=budget)
    rows, engine = run(given_, 4)
    for step, found in enumerate(rows, 1):
        assert len({row["row_id"] for row in found}) == len(found)
        for row in found:
            begun = row["prompt_ids"][0] // 10
            versions = row["token_versions"]
            assert (
                versions == [begun - 1 + at // budget for at in range(len(versions))] or step == 4
            )
            assert row["rollout_logprobs"] == [-float(version) for version in versions]
            assert row["weights_version"] == min(versions)
            assert step - begun < given_.steps_per_response
            siblings = [other for other in found if other["group_id"] == row["group_id"]]
            assert len(siblings) == 2
    assert max(engine.served[:6]) <= budget


def test_only_a_partial_rollout_writes_which_weights_sampled_each_token():
    for partial_, written in ((True, True), (False, False)):
        options = rollout(partial=True, max_tokens_per_step=2) if partial_ else rollout()
        node = Node("rollout", partial(generate, rollout=options), role="rollout")
        assert ("token_versions" in node.contract.writes.names) is written


def test_partial_responses_need_a_budget_and_staleness():
    for wrong in ({"partial": True}, {"max_tokens_per_step": 3}):
        with pytest.raises(ConfigError, match="expected both or neither"):
            RolloutConfig(**wrong)
    given_ = {"partial": True, "max_tokens_per_step": 3, "max_response_length": 9}
    with pytest.raises(
        ConfigError, match=r"max_staleness=1: expected .* and 2 more for a response of 3 steps"
    ):
        RolloutConfig(**given_, max_staleness=1)
    assert RolloutConfig(**given_, max_staleness=3).steps_ahead == 1
    assert replace(RolloutConfig(**given_, max_staleness=3), steps_ahead=0).steps_ahead == 0
    with pytest.raises(ConfigError, match=r"the steps ahead, 2 \(rollout.steps_ahead\)"):
        RolloutConfig(**given_, max_staleness=3, steps_ahead=2)
