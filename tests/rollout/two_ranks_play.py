"""Turns and more in both ranks of an engine, and again with an engine of one rank each, for
test_vllm_play.py: turns, self-play, tools, episodes over several steps, agents, and routes.
"""

from functools import partial

import pyarrow as pa

from siirl_dask.config import (
    EndpointConfig,
    Engine,
    EnvironmentsConfig,
    ModelConfig,
    RolloutConfig,
)
from siirl_dask.context import Context, Device, Rank
from siirl_dask.environments import build_environments
from siirl_dask.nodes import generate, play, run_agents
from siirl_dask.rollout import build_engine
from siirl_dask.schema import TYPES
from siirl_dask.tasks.calculator import Calculator
from siirl_dask.testing.reference_model import load_model
from tests.e2e.worlds import Delayed, Talking
from tests.nodes import living
from tests.settings import rollout_config

EXACT = ["row_id", "episode_id", "segment", "agent", "prompt_ids", "response_ids", "response_mask",
         "turns", "finish_reason", "reward", "sampling_seed", "token_versions", "routed_experts"]  # fmt: skip
LENGTH = 40
PROMPTS = {0: ["one", "say two", "3"], 1: ["and four"]}
"""The prompts of each rank: one has more than the other."""


def played(engine, folder, rank):
    """Return the rows of everything that an engine of several turns does, by name."""
    found = {}
    found["turns"] = episodes(engine, folder, PROMPTS[rank], rank, Delayed)
    found["turns of one rank"] = episodes(engine, folder, [[], ["alone"]][rank], rank, Delayed)
    agents = {"agents": ["a", "b"]}
    found["self-play"] = episodes(engine, folder, PROMPTS[rank], rank, Talking, **agents)
    chats = [[{"role": "user", "content": text}] for text in PROMPTS[rank]]
    found["tools"] = episodes(engine, folder, chats, rank, Calculator, turn_tokens=12)
    found["agents"] = with_agents(engine, PROMPTS[rank], rank)
    found["routes"] = rows_of(
        generate(
            context(engine),
            table(engine, PROMPTS[rank], rank),
            rollout=RolloutConfig(n=2, max_response_length=9, router_replay=True),
        )
    )
    found["with a window"] = with_window(engine, folder, rank)
    found["responses with a window"] = in_window(engine, rank, generate)
    found["over steps"] = over_steps(engine, folder, rank)
    return found


def engine_of(folder, rank, size, *, process):
    rollout = rollout_config(
        engine=Engine.vllm,
        process=process,
        max_rows=3,  # fewer than there are episodes
        tensor_parallel_size=size,
        router_replay=True,
        kv_cache_memory="64MiB",
    )
    model = ModelConfig(path=str(folder))
    return build_engine(Device(f"w{rank.rank}"), rank, model=model, rollout=rollout)


def table(engine, prompts, rank, first=0):
    ids = pa.array([rank + 2 * at + first for at in range(len(prompts))], pa.int64())
    encoded = [engine.tokenizer.encode(prompt) for prompt in prompts]
    is_chat = bool(prompts) and not isinstance(prompts[0], str)
    kind = pa.list_(pa.struct({"role": pa.string(), "content": pa.string()}))
    return pa.table(
        {
            "row_id": ids,
            "group_id": ids,
            "tokens": ids,
            "prompt": pa.array(prompts, kind if is_chat else pa.string()),
            "answer": pa.array(["3"] * len(prompts), pa.string()),
            "prompt_ids": pa.array(encoded, TYPES["prompt_ids"]),
            "prompt_text": pa.array([str(prompt) for prompt in prompts], TYPES["prompt_text"]),
        }
    )


def context(engine, world=None, step=1, **more):
    resources = {} if world is None else {"environments": world}
    return Context(
        step=step,
        run_seed=0,
        rank=Rank(),
        device=Device("w"),
        resource=engine,
        resources=resources,
        **more,
    )


def rows_of(made):
    names = [name for name in EXACT if name in made.column_names]
    return made.select([*names, "rollout_logprobs"]).sort_by("row_id").to_pylist()


def episodes(engine, folder, prompts, rank, environment, **settings):
    config = EnvironmentsConfig(**{"turns": 4, "turn_tokens": 6, **settings})
    world = build_environments(
        Device("w"),
        Rank(),
        environments=config,
        environment=environment,
        model=ModelConfig(path=str(folder)),
    )
    try:
        made = play(
            context(engine, world),
            table(engine, prompts, rank),
            rollout=RolloutConfig(n=4, max_response_length=LENGTH),
            environments=config,
            max_prompt_length=60,
        )
    finally:
        world.close()
    return rows_of(made)


def with_agents(engine, prompts, rank):
    made = run_agents(
        context(engine),
        table(engine, prompts, rank),
        rollout=RolloutConfig(n=2, max_response_length=60, max_rows=3),
        endpoint=EndpointConfig(),
        max_prompt_length=60,
        agent=living.talks,
    )
    return rows_of(made)


def with_window(engine, folder, rank):
    config = EnvironmentsConfig(turns=3, turn_tokens=6)
    world = build_environments(Device("w"), Rank(), environments=config, environment=Delayed)
    try:
        return in_window(
            engine,
            rank,
            partial(play, environments=config, max_prompt_length=60),
            world=world,
        )
    finally:
        world.close()


def in_window(engine, rank, node, **more):
    """Each rank decides by itself when its step is over; without new weights the step in which a
    token is sampled changes nothing.
    """
    rollout = RolloutConfig(n=2, max_response_length=LENGTH, window=1, max_staleness=5)
    state, rows = {}, []
    for step in (1, 2, 3):
        made = node(
            context(engine, step=step, state=state, drain=step == 3, **more),
            table(engine, PROMPTS[rank], rank, first=10 * step),
            rollout=rollout,
        )
        rows += rows_of(made)
        assert made.num_rows // 2 == len(PROMPTS[rank]) + {1: -1, 3: 1}.get(step, 0)
    for row in rows:
        for name in ("row_id", "episode_id"):  # they grow with the steps that a group waits
            row.pop(name, None)
    return sorted(rows, key=lambda row: row["sampling_seed"])


def over_steps(engine, folder, rank):
    """New weights arrive after the first step, while episodes are open."""
    config = EnvironmentsConfig(turns=3, turn_tokens=6)
    rollout = RolloutConfig(
        n=2,
        max_response_length=LENGTH,
        partial=True,
        max_tokens_per_step=4,
        max_staleness=LENGTH,
    )
    world = build_environments(Device("w"), Rank(), environments=config, environment=Delayed)
    state, rows = {}, []
    weights = {
        name: weight + 0.01 * weight.flip(0) if "mlp" in name else weight
        for name, weight in load_model(folder).state_dict().items()
    }
    try:
        for step in (1, 2, 3):
            drain = step == 3
            made = play(
                context(engine, world, step, state=state, drain=drain),
                table(engine, PROMPTS[rank] if step < 3 else [], rank, first=10 * step),
                rollout=rollout,
                environments=config,
                max_prompt_length=60,
            )
            rows += rows_of(made)
            engine.load_weights(weights.items(), engine.version + 1)
    finally:
        world.close()
    return rows
