"""Tests of episodes as rows: tokens stay as they were sampled, ids and draws depend on the
episode alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from siirl_dask.config import EnvironmentsConfig, RolloutConfig, ValidationConfig
from siirl_dask.context import Context, Device, Rank
from siirl_dask.environments import Failure, Opening, Step
from siirl_dask.environments.protocol import ToolCalls
from siirl_dask.errors import ConfigError, EpisodeError, PeerError, PlanError
from siirl_dask.nodes import play, play_answers
from siirl_dask.nodes.episodes.episode import digest
from siirl_dask.nodes.episodes.episode_rows import (
    EpisodeCodec,
    PlayedEpisode,
    PlayedRow,
    Turn,
    is_number,
)
from siirl_dask.planner import Node
from siirl_dask.planner.contract import contract_of
from siirl_dask.rollout import FinishReason, Generation
from siirl_dask.schema import TYPES
from tests.nodes.worlds import Echo, ThreadWorld

END = 0


@dataclass
class Drawing:
    """An engine whose tokens are a function of (seed, place): digits, until one that ends the
    turn.
    """

    rows: int = 4
    context_length: int | None = None
    version: int = 3
    processor: object = None
    served: list = field(default_factory=list)

    class tokenizer:
        @staticmethod
        def encode(prompt, tools=()):
            return [*map(ord, prompt)]

        encode_more = encode

        @staticmethod
        def decode(token_ids, *, skip_special):
            return "".join(chr(token) for token in token_ids if token != END)

        @staticmethod
        def plain_text(token_ids):
            return None

    def serve(self, queue):
        while taken := queue.next(self.rows, wait=True):
            for ticket, asked in taken:
                queue.complete(ticket, self.turn(asked))

    def turn(self, asked):
        self.served.append((list(asked.prompt), asked.begun, asked.sampling.max_tokens))
        tokens = []
        for place in range(asked.begun, asked.begun + asked.sampling.max_tokens):
            draw = hash((asked.seed, place))
            tokens.append(END if draw % 3 == 0 else ord("0") + draw % 10)
            if tokens[-1] == END:
                return Generation(tokens, [-0.5] * len(tokens), FinishReason.STOP)
        return Generation(tokens, [-0.5] * len(tokens), FinishReason.LENGTH)


def table(answers, prompts=None, **columns):
    ids = pa.array(range(len(answers)), pa.int64())
    prompts = prompts or [f"p{at}" for at in range(len(answers))]
    given = {
        "row_id": ids,
        "group_id": ids,
        "tokens": ids,
        "prompt": pa.array(prompts),
        "answer": pa.array(answers),
        "prompt_ids": pa.array([[*map(ord, prompt)] for prompt in prompts], TYPES["prompt_ids"]),
        "prompt_text": pa.array(prompts, TYPES["prompt_text"]),
    }
    return pa.table({**given, **columns})


def played(make, rows, *, n=1, engine=None, length=60, world=None, hand_over=None, **settings):
    """Return the rows that ``play`` makes, its context and its engine."""
    engine, world = engine or Drawing(), world or ThreadWorld(make)
    ctx = Context(
        step=1,
        run_seed=0,
        rank=Rank(),
        device=Device("w"),
        resource=engine,
        resources={"environments": world},
        hand_over=hand_over,
    )
    rollout, environments = (
        RolloutConfig(n=n, max_response_length=length),
        EnvironmentsConfig(**settings),
    )
    made = play(ctx, rows, rollout=rollout, environments=environments, max_prompt_length=30)
    assert world.opened == world.closed
    return made, ctx, engine


def scripted(reset, *steps):
    """An environment that answers with ``reset`` and then with each of ``steps``."""

    def make():
        left = iter(steps)
        return SimpleNamespace(reset=lambda row, seed: reset, step=lambda action: next(left))

    return make


class Tagged(Drawing):
    class tokenizer(Drawing.tokenizer):
        @staticmethod
        def plain_text(token_ids):
            return f"plain {len(token_ids)}"


def test_a_row_has_its_text_without_special_tokens_those_of_the_environment_included():
    rows, _, _ = played(Echo, table(["3", "1"]), n=2, engine=Tagged())
    plain = [f"plain {len(row)}" for row in rows["response_ids"].to_pylist()]
    assert rows["plain_response"].to_pylist() == plain


def test_rows_hold_the_turns_as_the_engine_saw_them():
    rows, _, engine = played(Echo, table(["3", "1"]), n=2)
    assert rows["row_id"].to_pylist() == rows["episode_id"].to_pylist() == [0, 1, 2, 3]
    assert rows["group_id"].to_pylist() == [0, 0, 1, 1]
    assert rows["sample_number"].to_pylist() == [0, 1, 0, 1]
    asked = {tuple(prompt) for prompt, _, _ in engine.served}
    for row in rows.to_pylist():
        spans = [(turn["start"], turn["stop"]) for turn in row["turns"]]
        sampled = [at for start, stop in spans for at in range(start, stop)]
        assert [at for at, own in enumerate(row["response_mask"]) if own] == sampled
        assert [score != 0 for score in row["rollout_logprobs"]] == row["response_mask"]
        assert row["token_versions"] == [3 if own else -1 for own in row["response_mask"]]
        for start, _ in spans:
            assert tuple(row["prompt_ids"] + row["response_ids"][:start]) in asked
        assert row["tokens"] == len(row["prompt_ids"]) + len(row["response_ids"])
        texts = [
            Drawing.tokenizer.decode(row["response_ids"][start:stop], skip_special=True)
            for start, stop in spans
        ]
        assert (
            row["response"]
            == "".join(f"{text}<{at}>" for at, text in enumerate(texts, 1))[: -len("<1>")]
        )
        assert row["reward"] == sum(map(len, texts)) == sum(turn["reward"] for turn in row["turns"])
        assert [turn["state"] for turn in row["turns"]] == [
            digest(at + 1) for at in range(len(spans))
        ]
    assert rows["finish_reason"].to_pylist() == ["environment"] * 4
    assert [len(turns) for turns in rows["turns"].to_pylist()] == [3, 3, 1, 1]


@settings(max_examples=20, deadline=None)
@given(
    answers=st.lists(st.integers(1, 5).map(str), min_size=1, max_size=12),
    rows=st.integers(1, 9),
    max_open=st.integers(1, 20),
    threads=st.integers(1, 8),
    cut=st.integers(0, 12),
)
def test_neither_batches_nor_order_nor_other_episodes_change_a_row(
    answers, rows, max_open, threads, cut
):
    expected, _, _ = played(Echo, table(answers), n=2)
    world, parts = ThreadWorld(Echo, delay=0.002, threads=threads), []
    for part in (table(answers).slice(0, cut), table(answers).slice(cut)):
        if part.num_rows:
            made, _, _ = played(
                None, part, n=2, engine=Drawing(rows), world=world, max_open=max_open
            )
            parts.append(made)
    assert pa.concat_tables(parts).sort_by("row_id").equals(expected)
    assert world.most_open <= max_open


def test_an_episode_ends_where_the_next_turn_has_no_room():
    rows, _, engine = played(Echo, table(["9"] * 6), length=10)
    assert {row["finish_reason"] for row in rows.to_pylist()} == {"length"}
    assert all(
        len(row["response_ids"]) <= 10 and row["response_mask"][-1] for row in rows.to_pylist()
    )
    assert all(begun + most <= 10 for _, begun, most in engine.served)
    rows, _, engine = played(Echo, table(["9"] * 6), length=99, engine=Drawing(context_length=12))
    assert all(len(prompt) + most <= 12 for prompt, _, most in engine.served)
    assert {row["finish_reason"] for row in rows.to_pylist()} == {"length"}
    rows, _, engine = played(Echo, table(["9"] * 6), turns=2, turn_tokens=1)
    assert {most for _, _, most in engine.served} == {1}
    assert {row["finish_reason"] for row in rows.to_pylist()} == {"turns"}


def test_a_row_with_a_limit_of_its_own_keeps_it_over_its_turns():
    rows, _, _ = played(Echo, table(["9", "9"], max_tokens=pa.array([5, None])), length=20)
    lengths = [len(ids) for ids in rows["response_ids"].to_pylist()]
    assert lengths[0] <= 5 < lengths[1]


def test_a_rewritten_history_begins_a_row_of_the_same_episode():
    make = scripted(
        Opening(prompt="first:"),
        Step(observation="a", reward=1.0),
        Step(history="again:", reward=2.0),
        Step(done=True, reward=4.0),
    )
    rows, _, _ = played(make, table(["x", "x"]), n=1, rows_per_episode=3)
    assert rows["row_id"].to_pylist() == [0, 1, 3, 4]
    assert rows["episode_id"].to_pylist() == [0, 0, 1, 1]
    assert rows["segment"].to_pylist() == [0, 1, 0, 1]
    assert rows["prompt_text"].to_pylist() == ["first:", "again:"] * 2
    assert rows["reward"].to_pylist() == [3.0, 4.0] * 2
    assert rows["finish_reason"].to_pylist()[1::2] == ["environment"] * 2
    assert len({*rows["sampling_seed"].to_pylist()}) == 4


def test_more_rows_than_allowed_fail_the_episode_by_the_option():
    make = scripted(Opening(), Step(history="again:"))
    with pytest.raises(
        EpisodeError, match=r"row 2 of an episode.*environments\.rows_per_episode allows 1"
    ):
        played(make, table(["x"]))


def test_agents_have_rows_of_their_own_and_rewards_of_both():
    make = scripted(
        Opening(prompt="game:", agent="a"),
        Step(observation="to b", agent="b"),
        Step(observation="to a", agent="a"),
        Step(done=True, reward={"a": 1.0, "b": -1.0}),
    )
    rows, ctx, _ = played(make, table(["x"]), agents=["a", "b"])
    first, second = rows.to_pylist()
    assert (first["agent"], second["agent"]) == ("a", "b")
    assert (first["reward"], second["reward"]) == (1.0, -1.0)
    assert (first["prompt_text"], second["prompt_text"]) == ("game:", "game:to b")
    assert "to a" in first["response"]
    assert [turn["reward"] for turn in first["turns"]] == [0.0, 1.0]
    assert first["finish_reason"] == second["finish_reason"] == "environment"
    assert (first["segment"], second["segment"]) == (0, 0)
    assert ctx.metrics["episodes/turns"].value == 3
    assert "agent" not in played(Echo, table(["1"]))[0].column_names


def test_a_reward_for_an_agent_that_has_not_spoken_is_its_first_turns():
    make = scripted(
        Opening(agent="a"),
        Step(agent="b", reward={"a": 1.0, "b": 0.5}),
        Step(done=True, reward=2.0),
    )
    rows, _, _ = played(make, table(["x"]), agents=["a", "b"])
    assert rows["reward"].to_pylist() == [1.0, 2.5]


FAILURES = {
    "took more than 3 s": scripted(Opening(), Failure("took more than 3 s")),
    "raised KeyError: 'x'": scripted(Failure("raised KeyError: 'x'")),
    "gave the reward nan": scripted(Opening(), Step(reward=float("nan"))),
    "gave 'x' for 'part'": scripted(Opening(), Step(parts={"part": "x"})),
    "named the agent 'b'": scripted(Opening(), Step(observation="hello", agent="b")),
    "gave a prompt of 0 tokens": scripted(Opening(prompt="")),
    "gave a prompt of 31 tokens: expected 1 to 30": scripted(Opening(prompt="x" * 31)),
    "gave messages where the episode began with a string": scripted(
        Opening(), Step(observation=[{"role": "user", "content": "x"}])
    ),
    "has tools, and its prompt is a string": scripted(Opening(tools=[{}])),
    "gave the rewards {'a': 1.0}: expected a number": scripted(Opening(), Step(reward={"a": 1.0})),
    "gave a state of type object": scripted(Opening(), Step(state=object())),
}


@pytest.mark.parametrize("reason", FAILURES)
def test_an_environment_that_gives_no_usable_answer_stops_the_step_by_name(reason):
    with pytest.raises(EpisodeError) as error:
        played(FAILURES[reason], table(["x"]))
    assert f"the environment {reason}" in str(error.value)
    assert "episode 0 of step 1" in str(error.value)
    assert error.value.origin.rows == (0,)


def fails_for_some():
    class Some(Echo):
        def reset(self, row, seed):
            super().reset(row, seed)
            if row["prompt"] == "p1":
                raise ValueError("no")

        def step(self, action):
            if self.left == 4 and self.turns == 2:
                raise ValueError("later")
            return super().step(action)

    return Some


def test_failed_episodes_have_no_reward_and_no_other_row_changes():
    world = ThreadWorld(fails_for_some(), max_failures=2)
    rows, ctx, _ = played(None, table(["2", "2", "4"]), world=world)
    assert rows["finish_reason"].to_pylist() == ["environment", "failed", "failed"]
    assert [reward is None for reward in rows["reward"].to_pylist()] == [False, True, True]
    assert [len(turns) for turns in rows["turns"].to_pylist()] == [2, 0, 3]
    assert rows.slice(0, 1).equals(played(Echo, table(["2"]))[0])
    assert ctx.metrics["episodes/failed"].value == 2


def test_after_too_many_failures_no_other_episode_begins():
    world = ThreadWorld(scripted(Failure("is broken")), max_failures=1)
    with pytest.raises(EpisodeError, match=r"is broken.*environments\.max_failures=1"):
        played(None, table(["1"] * 400), world=world, max_open=10)
    assert world.opened < 100


@pytest.mark.parametrize(
    ("calls", "failed", "most", "ends"),
    [
        (4, 2, None, False),
        (4, 2, 0.5, False),
        (4, 3, 0.5, True),
        (4, 1, 0.0, True),
        (0, 0, 0.0, False),
    ],
)
def test_calls_of_tools_are_logged_and_too_large_a_share_that_failed_ends_the_run(
    calls, failed, most, ends
):
    world = ThreadWorld(Echo)
    world.tool_calls, world.max_failed_calls = (
        ToolCalls(calls, failed, "raised OSError: down"),
        most,
    )
    if ends:
        with pytest.raises(
            EpisodeError,
            match=rf"{failed} of 4 calls .*max_failed_calls={most}.*raised OSError: down",
        ):
            played(Echo, table(["1"]), world=world)
        return
    _, ctx, _ = played(Echo, table(["1"]), world=world)
    logged = {
        name: metric.value for name, metric in ctx.metrics.items() if name.startswith("tools/")
    }
    assert logged == ({"tools/calls": calls, "tools/failed": failed} if calls else {})


def test_an_engine_that_fails_closes_what_is_open():
    class Broken(Drawing):
        def turn(self, asked):
            raise ValueError("engine")

    world = ThreadWorld(Echo)
    with pytest.raises(ValueError, match="engine"):
        played(None, table(["3"] * 9), engine=Broken(), world=world)
    assert world.opened == world.closed == 9


def test_rows_are_handed_over_as_soon_as_their_episode_has_ended():
    handed = []
    rows, _, _ = played(Echo, table(["3", "1", "2"]), hand_over=handed.append)
    assert pa.concat_tables(handed).sort_by("row_id").equals(rows)


def test_samples_of_a_prompt_meet_the_same_environment():
    seeds = []

    class Noting(Echo):
        def reset(self, row, seed):
            super().reset(row, seed)
            seeds.append((row["prompt"], seed))

    played(Noting, table(["1", "1"]), n=3)
    assert len(seeds) == 6
    assert len({*seeds}) == 2


def test_validation_plays_greedily_or_as_it_says():
    greedy = []

    class Noting(Drawing):
        def turn(self, asked):
            greedy.append(asked.sampling.temperature)
            return super().turn(asked)

    ctx = Context(
        0, 0, Rank(), Device("w"), Noting(), resources={"environments": ThreadWorld(Echo)}
    )
    options = {
        "rollout": RolloutConfig(),
        "environments": EnvironmentsConfig(),
        "max_prompt_length": 9,
    }
    rows = play_answers(ctx, table(["2"]), validation=ValidationConfig(), **options)
    assert rows.num_rows == 1
    assert {*greedy} == {0.0}


@pytest.mark.parametrize(
    ("rollout", "said"),
    [
        (RolloutConfig(router_replay=True), "rollout.router_replay=true"),
        (
            RolloutConfig(partial=True, max_tokens_per_step=9, max_response_length=9),
            "rollout.partial=true",
        ),
    ],
)
def test_what_cannot_play_is_refused_before_the_run(rollout, said):
    environments = EnvironmentsConfig(max_open=9 if rollout.partial else None)
    options = {"rollout": rollout, "environments": environments, "max_prompt_length": 9}
    with pytest.raises(PlanError, match=said):
        Node("play", play, role="rollout", options=options).try_options()


def test_agents_and_rows_that_do_not_fit_are_refused():
    with pytest.raises(ConfigError, match="more than once"):
        EnvironmentsConfig(agents=["a", "a"])
    with pytest.raises(ConfigError, match="one for each of the 2 agents"):
        EnvironmentsConfig(agents=["a", "b"], rows_per_episode=1)
    assert EnvironmentsConfig(agents=["a", "b"]).rows_per_episode == 2


ROW = PlayedRow(
    "a",
    1,
    [1, 2],
    [3, 4],
    [True, False],
    [-0.5, 0.0],
    [Turn(0, 1, 0.5, 7)],
    {"x": 1.0},
    FinishReason.TURNS,
    [3, -1],
)
CODEC = EpisodeCodec(pa.schema({"row_id": pa.int64(), "answer": pa.string()}), 3, 2)


def test_episodes_survive_packing():
    item = {"row_id": 4, "answer": "x", "shown": ()}
    assert CODEC.read_item(CODEC.pack_item(item)) == item
    for result in (
        PlayedEpisode([ROW], "w", None),
        PlayedEpisode([PlayedRow(None, 0, [1]), ROW], "w", "failed"),
    ):
        assert CODEC.read_result(CODEC.pack_result(result)) == result


@pytest.mark.parametrize(
    "change",
    [
        {"turns": [[0, 3, 0.5, 7]]},
        {"turns": [[1, 0, 0.5, 7]]},
        {"turns": [[0, 1, float("inf"), 7]]},
        {"turns": [[0, 1, 0.5]]},
        {"mask": b""},
        {"versions": b""},
        {"versions": np.array([-1, 3], "<i8").tobytes()},
        {"versions": np.array([4, -1], "<i8").tobytes()},
        {"versions": np.array([3, -2], "<i8").tobytes()},
        {"logprobs": b"\0" * 12},
        {"parts": {"x": "y"}},
        {"prompt": b""},
        {"reason": "x"},
        {"agent": 3},
    ],
)
def test_a_played_episode_that_does_not_fit_together_is_refused(change):
    packed = CODEC.pack_result(PlayedEpisode([ROW], "w", None))
    packed["rows"][0] |= change
    with pytest.raises(PeerError, match="received"):
        CODEC.read_result(packed)


def test_other_episodes_than_the_nodes_are_refused():
    other = EpisodeCodec(pa.schema({"row_id": pa.int64()}), 3, 2)
    with pytest.raises(PeerError, match="columns"):
        CODEC.read_item(other.pack_item({"row_id": 1}))
    with pytest.raises(PeerError, match="version 4: those here are 3"):
        CODEC.read_item({**CODEC.pack_item({"row_id": 1, "answer": "x"}), "version": 4})
    with pytest.raises(PeerError, match="cannot be read"):
        CODEC.read_item({"row": b"x" * 40, "version": 3, "shown": []})
    with pytest.raises(PeerError, match="no played episode"):
        CODEC.read_result(CODEC.pack_result(PlayedEpisode([ROW] * 3, "w", None)))


def test_equal_states_have_equal_hashes_in_every_process():
    assert digest(("a", 1, frozenset({3, 2}))) == 6982279644479086248
    assert digest({"x": 1, "y": 2}) == digest({"y": 2, "x": 1})
    assert digest(None) == 0
    assert digest("a") != digest(("a",))


def test_the_columns_of_agents_are_part_of_the_contract():
    one = contract_of(
        partial(
            play, rollout=RolloutConfig(), environments=EnvironmentsConfig(), max_prompt_length=9
        )
    )
    two = contract_of(
        partial(
            play,
            rollout=RolloutConfig(),
            environments=EnvironmentsConfig(agents=["a", "b"]),
            max_prompt_length=9,
        )
    )
    assert {*two.writes.names} - {*one.writes.names} == {"agent"}
    assert {"prompt", "answer"} <= {*one.reads}
    assert one.neighbour == "environments"


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (1, True),
        (-0.5, True),
        (1e39, False),
        (10**400, False),
        (-(10**400), False),
        (float("nan"), False),
        ("1", False),
    ],
)
def test_a_number_of_any_size_from_an_environment_is_taken_or_refused_and_ends_no_run(
    value, expected
):
    assert is_number(value) is expected
