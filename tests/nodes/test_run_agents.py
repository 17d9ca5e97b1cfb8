"""Agents on the endpoint: rows of what was sampled, the same however fast they are; failures
stay their own.
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import psutil
import pyarrow as pa
import pytest

from siirl_dask.config import (
    EndpointConfig,
    ModelConfig,
    RolloutConfig,
    TrainerConfig,
    ValidationConfig,
)
from siirl_dask.context import Context, Device, Rank
from siirl_dask.errors import Aborted, ConfigError, EpisodeError, PeerError
from siirl_dask.nodes import (
    generate,
    generate_answers,
    policy_logprobs,
    run_agents,
    run_agents_to_validate,
)
from siirl_dask.nodes.episodes.run_agents import _check_options
from siirl_dask.nodes.failures import GIVEN_UP
from siirl_dask.rollout import LocalQueue
from siirl_dask.rollout.transformers_engine.engine import TransformersEngine
from siirl_dask.schema import TYPES
from siirl_dask.tasks.tiny_model import CHAT_TEMPLATE, tiny_model
from siirl_dask.training import build_trainer
from tests.nodes import living

PROGRAM = (sys.executable, str(Path(__file__).parent / "program.py"))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return ModelConfig(
        path=str(tiny_model(tmp_path_factory.mktemp("model"), chat_template=CHAT_TEMPLATE))
    )


@pytest.fixture(scope="module")
def engine(model):
    return TransformersEngine(model, max_rows=8)


def prompts(engine, texts, first=0, answers=None, **columns):
    ids = pa.array(range(first, first + len(texts)), pa.int64())
    encoded = pa.array([engine.tokenizer.encode(text) for text in texts], TYPES["prompt_ids"])
    given = {
        "prompt": texts,
        "answer": answers or ["x"] * len(texts),
        "prompt_ids": encoded,
        **columns,
    }
    return pa.table({"row_id": ids, "group_id": ids, "tokens": ids, **given})


def context(engine, **how):
    return Context(
        step=1, run_seed=0, rank=Rank(), resource=engine, **{"device": Device("w"), **how}
    )


def rollout(**changes):
    return RolloutConfig(**{"n": 2, "max_response_length": 60, "max_rows": 8, **changes})


@pytest.fixture
def live(engine):
    """Return a function: ``live(agent, table, **endpoint)`` gives the node's output and its
    metrics.
    """
    before = {*threading.enumerate()}

    def run(agent, table, *, n=2, columns=(), ctx=None, **endpoint):
        ctx = ctx or context(engine)
        how = {"command": agent} if isinstance(agent, tuple) else {"agent": agent}
        rows = run_agents(
            ctx,
            table,
            rollout=rollout(n=n),
            endpoint=EndpointConfig(**endpoint),
            max_prompt_length=60,
            columns=columns,
            **how,
        )
        return rows, {name: metric.value for name, metric in ctx.metrics.items()}

    yield run
    assert not {*threading.enumerate()} - before


FOUR = [f"say {number}" for number in range(4)]
TO_THE_BIT = [
    "row_id",
    "group_id",
    "episode_id",
    "segment",
    "sampling_seed",
    "prompt_ids",
    "response_ids",
    "response",
    "response_mask",
    "token_versions",
    "turns",
    "finish_reason",
    "reward",
    "reward_parts",
]


def test_an_agent_that_asks_once_has_the_rows_of_generate(engine, live):
    table = prompts(engine, FOUR)
    rows, _ = live(living.asks_once, table, max_segments=1)
    expected = generate(context(engine), table, rollout=rollout())
    for name in (
        "row_id",
        "prompt_ids",
        "response_ids",
        "response",
        "sample_number",
        "sampling_seed",
        "finish_reason",
    ):
        assert rows[name].equals(expected[name]), name
    flat = [
        side["rollout_logprobs"].combine_chunks().flatten().to_pylist() for side in (rows, expected)
    ]
    assert flat[0] == pytest.approx(flat[1], abs=1e-5)
    how = {"rollout": rollout(), "validation": ValidationConfig(n=1)}
    asked = {
        **how,
        "endpoint": EndpointConfig(max_segments=1),
        "max_prompt_length": 60,
        "agent": living.asks_once,
    }
    rows, expected = (
        run_agents_to_validate(context(engine), table, **asked),
        generate_answers(context(engine), table, **how),
    )
    assert rows["response_ids"].equals(expected["response_ids"])


def by_prompts(rows):
    """Return the rows of each episode in the order of their prompts, without their places in it,
    and without rewards, which the last one has: of things asked at once, one may be answered before
    another arrives.
    """
    spans = [
        [(turn["start"], turn["stop"]) for turn in turns] for turns in rows["turns"].to_pylist()
    ]
    rows = rows.set_column(
        rows.column_names.index("turns"), "turns", pa.array(spans, pa.list_(pa.list_(pa.int32())))
    )
    rows = rows.drop_columns(["row_id", "segment", "reward", "reward_parts"])
    order = sorted(
        range(rows.num_rows),
        key=lambda at: (rows["episode_id"][at].as_py(), rows["prompt_ids"][at].as_py()),
    )
    return rows.take(order)


@pytest.mark.parametrize(
    ("agent", "shown"), [(living.talks, lambda rows: rows), (living.maps, by_prompts)]
)
def test_rows_do_not_depend_on_how_fast_agents_are_nor_on_who_runs_them(engine, live, agent, shown):
    table = prompts(engine, FOUR)
    rows, metrics = live(agent, table)
    again, _ = live(agent, table, max_open=1)
    halves = [live(agent, prompts(engine, FOUR[at : at + 2], first=at))[0] for at in (0, 2)]
    rows = shown(rows)
    for other in (shown(again), shown(pa.concat_tables(halves))):
        for name in (name for name in TO_THE_BIT if name in rows.column_names):
            assert other[name].equals(rows[name]), name
        flat = [
            side["rollout_logprobs"].combine_chunks().flatten().to_pylist()
            for side in (rows, other)
        ]
        assert flat[0] == pytest.approx(flat[1], abs=1e-5)
    assert metrics["episodes"] == 8
    assert metrics["episodes/turns"] == 3


def test_a_rewritten_history_is_a_row_and_the_episodes_reward_counts_once(engine, live):
    rows, metrics = live(living.talks, prompts(engine, FOUR), max_segments=2)
    assert rows["episode_id"].to_pylist() == [episode for episode in range(8) for _ in range(2)]
    assert rows["row_id"].to_pylist() == [*range(16)]
    assert rows["segment"].to_pylist() == [0, 1] * 8
    for first, second in zip(*[iter(rows.to_pylist())] * 2, strict=True):
        assert [len(row["turns"]) for row in (first, second)] == [2, 1]
        assert first["reward"] == 0.0
        assert (
            second["reward"]
            == second["turns"][-1]["reward"]
            == dict(second["reward_parts"])["reward"]
        )
        for row in (first, second):
            spans = [range(turn["start"], turn["stop"]) for turn in row["turns"]]
            own = [at for span in spans for at in span]
            assert [at for at, mine in enumerate(row["response_mask"]) if mine] == own
            assert [at for at, score in enumerate(row["rollout_logprobs"]) if score] == own
            assert [at for at, version in enumerate(row["token_versions"]) if version == -1] == [
                at for at in range(len(row["response_ids"])) if at not in own
            ]
            assert row["tokens"] == len(row["prompt_ids"]) + len(row["response_ids"])
    assert metrics["reward/mean"] == pytest.approx(
        sum(row["reward"] for row in rows.to_pylist()) / 8
    )
    assert metrics["reward/asked"] == 3


def test_trainer_and_engine_agree_on_what_was_sampled(engine, model, live):
    rows, _ = live(living.talks, prompts(engine, FOUR))
    trainer = build_trainer(
        Device("w"), Rank(), model=model, trainer=TrainerConfig(), rollout=rollout()
    )
    scored = policy_logprobs(context(trainer), rows)
    for row in scored.to_pylist():
        own = [at for at, mine in enumerate(row["response_mask"]) if mine]
        ours, theirs = (
            [row[name][at] for at in own] for name in ("rollout_logprobs", "old_logprobs")
        )
        assert ours == pytest.approx(theirs, abs=1e-5)


def test_an_agent_gets_its_row_and_the_columns_it_wants(engine, live):
    rows, metrics = live(
        living.tells_its_row, prompts(engine, FOUR, level=[1.0, 2.0, 3.0, 4.0]), columns=("level",)
    )
    assert metrics["reward/level"] == 2.5
    seeds = {dict(parts)["seed"] for parts in rows["reward_parts"].to_pylist()}
    assert len(seeds) == 8


class Shared:
    """Work of one worker, and with it, when there is no more, what a peer had that has not
    begun.
    """

    taken_over = 0

    def __init__(self, stolen=()):
        self.stolen, self.items, self.codec, self.returned, self.limits = (
            [*stolen],
            [],
            None,
            {},
            [],
        )

    def __call__(self, items, codec):
        self.items, self.codec = items, codec
        self.queue = LocalQueue(items)
        return self

    def next(self, limit, *, wait):
        if own := self.queue.next(limit, wait=wait):
            return own
        self.limits.append(limit)
        taken, self.stolen = self.stolen[:limit], self.stolen[limit:]
        return [(("peer", number), self.codec.read_item(item)) for number, item in taken]

    def complete(self, ticket, result):
        if isinstance(ticket, tuple):
            self.returned[ticket[1]] = self.codec.pack_result(result)
        else:
            self.queue.complete(ticket, result)

    def results(self):
        return self.queue.results()


def test_a_worker_runs_the_agents_of_a_peer_and_gives_their_episodes_back(engine, live):
    table, owner = prompts(engine, FOUR), Shared()
    expected, _ = live(living.talks, table, ctx=context(engine, steal_from_peers=owner))
    packed = [(number, owner.codec.pack_item(item)) for number, item in enumerate(owner.items)]
    thief = Shared(packed)
    alone = context(engine, steal_from_peers=thief, device=Device("thief"))
    live(living.talks, prompts(engine, ["mine"], first=9), n=1, ctx=alone)
    assert thief.returned.keys() == {*range(8)}
    lived = [owner.codec.read_result(thief.returned[number]) for number in range(8)]
    assert {one.worker for one in lived} == {"thief"}
    for one, straight in zip(lived, owner.results(), strict=True):
        assert (one.score, one.requests) == (straight.score, straight.requests)
        for row, other in zip(one.segments, straight.segments, strict=True):
            for name in ("prompt", "seed", "response", "mask", "versions", "turns", "finish"):
                assert getattr(row, name) == getattr(other, name), name
    assert max(thief.limits) <= 8  # rows of the engine: no more agents of others than fill them
    assert expected.num_rows == 16


def test_agents_that_are_given_up_are_told_to_their_owners(engine, live):
    owner = Shared()
    live(living.talks, prompts(engine, FOUR), ctx=context(engine, steal_from_peers=owner))
    packed = [(number, owner.codec.pack_item(item)) for number, item in enumerate(owner.items)]
    thief = Shared(packed)
    with pytest.raises(EpisodeError, match="no tool for that"):
        live(
            living.raises,
            prompts(engine, ["mine"], first=9),
            n=1,
            ctx=context(engine, steal_from_peers=thief),
        )
    lived = [owner.codec.read_result(thief.returned[number]) for number in range(8)]
    assert {one.score.failure for one in lived} == {GIVEN_UP}


@pytest.mark.parametrize(
    "change",
    [
        {"seeds": [1]},
        {"seeds": [-1, 2]},
        {"seeds": ["x", 2]},
        {"reward": "x"},
        {"reward": float("inf")},
        {"parts": {"x": "y"}},
        {"requests": -1},
        {"seconds": None},
        {"episode": {}},
        {"reward": 1.0, "failure": True},
    ],
)
def test_an_episode_of_a_peer_that_does_not_fit_together_is_refused(engine, live, change):
    owner = Shared()
    live(living.talks, prompts(engine, FOUR[:1]), n=1, ctx=context(engine, steal_from_peers=owner))
    packed = owner.codec.pack_result(owner.results()[0])
    if change.pop("failure", False):
        packed["episode"]["failure"] = "failed"
    with pytest.raises(PeerError, match="received"):
        owner.codec.read_result(packed | change)


FAILURES = {
    "raises": (
        living.raises,
        r"the agent raised ValueError: no tool for that \(tests/.*:\d+\): episode 0 of step 1, "
        "after 0 requests",
    ),
    "raises what is no text": (
        living.raises_half_a_character,
        r"the agent raised ValueError: no tool a\?b \(tests/.*:\d+\): episode 0",
    ),
    "exits": (
        living.exits,
        r"the agent raised SystemExit: usage: agent \(tests/.*:\d+\): episode 0 of step 1, after 0 "
        "requests",
    ),
    "hangs": (living.hangs, "the agent took more than 1 s: episode"),
    "asks nothing": (living.asks_nothing, "the agent asked the model nothing"),
    "gives text": (living.gives_text, "the agent gave 'very good': expected a finite number"),
}


@pytest.mark.parametrize(("agent", "words"), FAILURES.values(), ids=FAILURES)
def test_what_an_agent_does_wrong_ends_the_step_and_names_the_episode(engine, live, agent, words):
    with pytest.raises(EpisodeError, match=words) as caught:
        live(agent, prompts(engine, FOUR), timeout=1 if agent is living.hangs else 60)
    assert caught.value.origin.rows
    assert "(endpoint.max_failures=0)" in str(caught.value)


def test_an_allowed_failure_has_no_reward_and_keeps_its_tokens(engine, live):
    rows, metrics = live(living.fails_for_one, prompts(engine, FOUR), max_failures=2)
    failed = [row for row in rows.to_pylist() if row["finish_reason"] == "failed"]
    assert [row["episode_id"] for row in failed] == [2, 3]
    assert all(row["reward"] is None and row["response_ids"] for row in failed)
    assert all(row["reward"] is not None for row in rows.to_pylist() if row not in failed)
    assert metrics["episodes/failed"] == 2
    rows, _ = live(living.raises, prompts(engine, FOUR), max_failures=8)
    assert rows["response_ids"].to_pylist() == [[]] * 8
    assert rows["prompt_ids"].to_pylist() == [
        engine.tokenizer.encode(text) for text in FOUR for _ in range(2)
    ]


def test_an_agent_that_returns_none_leaves_its_episode_out(engine, live):
    rows, metrics = live(living.rejects, prompts(engine, FOUR))
    assert rows["reward"].to_pylist() == [None] * 8
    assert metrics["episodes/failed"] == 0


def test_an_agent_that_blocks_the_loop_of_all_is_named(engine, live, monkeypatch):
    monkeypatch.setattr("siirl_dask.rollout.endpoint.agents._PATIENCE", 0.5)
    living.RELEASED.clear()
    with pytest.raises(
        EpisodeError, match="blocked the event loop of all agents for more than 1 s"
    ):
        live(living.blocks, prompts(engine, FOUR[:1]), n=1, timeout=1)
    living.RELEASED.set()
    (thread,) = [thread for thread in threading.enumerate() if thread.name == "siirl-agents"]
    thread.join(10)


def test_a_run_that_stops_ends_the_agents(engine, live):
    asked = threading.Event()

    async def waits(client, row):
        await living.asks_once(client, row)
        asked.set()
        await living.hangs(client, row)

    def check_stop():
        if asked.is_set():
            raise Aborted("the run is over")

    with pytest.raises(Aborted):
        live(waits, prompts(engine, FOUR), ctx=context(engine, check_stop=check_stop))


def test_an_engine_that_fails_ends_the_agents(engine, live):
    class Broken:
        tokenizer, version, context_length = engine.tokenizer, 0, None

        def serve(self, queue):
            queue.next(4, wait=True)
            raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        live(living.talks, prompts(engine, FOUR), ctx=context(Broken()))


def test_no_prompts_are_no_agents(engine, live):
    rows, _ = live(living.talks, prompts(engine, FOUR).slice(0, 0))
    assert rows.num_rows == 0


def test_programs_are_agents(engine, live):
    rows, metrics = live(PROGRAM, prompts(engine, ["say 0", "talks too much"]), n=1)
    assert rows["reward"].to_pylist() == [float(len(text)) for text in rows["response"].to_pylist()]
    assert metrics["reward/program"] == 1
    with pytest.raises(
        EpisodeError, match="raised RuntimeError: the command ended with code 1: out of tools"
    ):
        live(PROGRAM, prompts(engine, ["dies"]), n=1)
    with pytest.raises(EpisodeError, match="its last line is '': expected the reward as JSON"):
        live(("true",), prompts(engine, ["say 0"]), n=1)
    with pytest.raises(EpisodeError, match="raised FileNotFoundError"):
        live(("no-such-program",), prompts(engine, ["say 0"]), n=1)


def test_a_program_that_hangs_is_killed(engine, live, tmp_path):
    noted = tmp_path / "pid"
    with pytest.raises(EpisodeError, match="took more than 5 s"):
        live(PROGRAM, prompts(engine, ["hangs"], answers=[str(noted)]), n=1, timeout=5)
    assert not psutil.pid_exists(int(noted.read_text()))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, r"agent=None and command=\[\]: expected one of them"),
        ({"agent": living.talks, "command": ("true",)}, "expected one of them"),
        (
            {"agent": living.talks, "rollout": rollout(router_replay=True)},
            "router_replay=true",
        ),
        (
            {
                "agent": living.talks,
                "rollout": rollout(partial=True, max_tokens_per_step=9, max_staleness=9),
            },
            "partial=true",
        ),
    ],
)
def test_what_cannot_work_is_refused_before_a_run(options, words):
    with pytest.raises(ConfigError, match=words):
        _check_options(**{"rollout": rollout(), **options})
