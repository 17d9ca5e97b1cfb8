"""Tests of steps whose prompts are too long, on one worker or on all of them."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from siirl_dask import grpo, ppo
from siirl_dask.algorithms import KLController
from siirl_dask.algorithms import grpo as grpo_advantage
from siirl_dask.config import RewardsConfig, RolloutConfig
from siirl_dask.config.file import load, shipped
from siirl_dask.context import Context, Device, Rank
from siirl_dask.coordinator.dataloader import open_source, source_schema
from siirl_dask.nodes import (
    choose_covariant,
    draw_minibatches,
    encode_prompts,
    estimate_advantage,
    generate,
    generate_with_greedy,
    mask_truncated,
    measure_answers,
    penalise_kl,
    penalise_overlong,
    score,
    take_greedy_baselines,
)
from siirl_dask.planner import compile_chains
from siirl_dask.rewards import build_scorer
from siirl_dask.rollout import FinishReason, Generation
from siirl_dask.schema import TYPES
from siirl_dask.tasks.sorting import digit_fraction
from siirl_dask.testing.local_pool import LocalPool
from siirl_dask.testing.rows import flat
from tests.conftest import digits_overrides
from tests.long_prompts import LIMIT, write_long_prompts
from tests.nodes.letters import Letters, table


class Endless(Letters):
    """An engine whose responses end at their limit alone."""

    def serve(self, queue):
        while requests := queue.next(2, wait=True):
            for ticket, request in requests:
                count = request.sampling.max_tokens
                queue.complete(ticket, Generation([7] * count, [-1.0] * count, FinishReason.LENGTH))


def encoded(prompts, step):
    """Encode prompts where a letter is a token and three are the limit; return the table and the
    context.
    """
    ctx = Context(step, 0, Rank(), Device("w"), Letters())
    rows = table(prompt=pa.array(prompts, pa.string()))
    return encode_prompts(ctx, rows, max_prompt_length=3), ctx


def test_a_worker_whose_prompts_are_all_too_long_goes_on_without_rows():
    some, _ = encoded(["a", "bb", "long"], 1)
    none, ctx = encoded(["longer", "longest"], 1)
    assert some["prompt"].to_pylist() == ["a", "bb"]
    assert none.num_rows == 0
    assert none.schema.equals(some.schema)
    counts = [
        ctx.metrics[f"data/{name}"].value
        for name in ("prompts", "dropped_prompts", "shortest_dropped_prompt")
    ]
    assert counts == [0, 2, 6]


def test_a_partial_rollout_without_rows_continues_what_it_kept():
    rollout = RolloutConfig(
        n=1, partial=True, max_tokens_per_step=1, max_response_length=2, max_staleness=1
    )
    none, ctx = encoded(["long"], 2)
    assert generate(ctx, none, rollout=rollout).num_rows == 0
    prompts, begun = encoded(["a"], 3)
    begun.resource = Endless()
    assert generate(begun, prompts, rollout=rollout).num_rows == 0
    ctx.state, ctx.resource = begun.state, begun.resource
    assert generate(ctx, none, rollout=rollout)["response_ids"].to_pylist() == [[7, 7]]


def test_nodes_that_other_algorithms_add_take_tables_without_rows():
    rows, ctx = encoded(["long"], 2)
    rows = rows.append_column("answer", pa.array([], pa.string()))
    rows = generate_with_greedy(ctx, rows, rollout=RolloutConfig(n=2))
    ctx.resource = build_scorer(Device("w"), Rank(), rewards=RewardsConfig(), reward=digit_fraction)
    rows = penalise_overlong(ctx, score(ctx, mask_truncated(ctx, rows)), max_length=9)
    rows = take_greedy_baselines(ctx, measure_answers(ctx, rows, n=2, k=(1, 2)))
    for name in ("old_logprobs", "reference_logprobs"):
        rows = rows.append_column(name, pa.array([], TYPES[name]))
    ctx.resource = KLController(0.1)
    rows = estimate_advantage(ctx, penalise_kl(ctx, rows), advantage=grpo_advantage)
    rows = choose_covariant(
        ctx, draw_minibatches(ctx, rows, minibatches=2, batch_size=2), minibatches=2
    )
    assert rows.num_rows == 0
    assert ctx.resource.coefficient == 0.1


def planned(recipe, task, tmp_path, workers, *parts, config="quickstart.yaml"):
    """Return a pool for the digits task: all workers generate, the last learns; ``parts`` have
    long prompts.
    """
    overrides = [
        f"data.max_prompt_length={LIMIT}",
        f"cluster.workers={workers}",
        "cluster.placement={}",
    ]
    config = load(shipped(config), [*digits_overrides(task, tmp_path / "run"), *overrides])
    source = write_long_prompts(
        tmp_path / "data.parquet", *parts, batch_size=config.data.batch_size
    )
    generating, learning = [*range(workers)], [workers - 1]
    dag = recipe(config)
    placement = {
        role.name: generating if role.name in ("rollout", "reward") else learning
        for role in dag.roles
    }
    schema = source_schema(open_source(source).schema, source)
    names = [f"w{number}" for number in range(workers)]
    return LocalPool(compile_chains(dag, names, schema, placement), source, str(tmp_path / "run"))


def learned(pool, role):
    """Return copies of weights, optimizer state and progress."""
    state = flat(pool.resources(pool.workers[-1])[role].state())
    return {name: value.clone() for name, value in state.items()}


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize(
    ("recipe", "config"), [(grpo, "quickstart.yaml"), (ppo, "quickstart_ppo.yaml")]
)
def test_a_step_without_rows_changes_no_weight_and_no_optimizer_state(
    digits_task, tmp_path, recipe, config, workers
):
    with planned(recipe, digits_task, tmp_path, workers, (2, 0, 1), config=config) as pool:
        pool.run(1)
        trained = [
            role for role in ("policy", "critic") if role in pool.resources(pool.workers[-1])
        ]
        before = {role: learned(pool, role) for role in trained}
        skipped = pool.run(2)
        after = {role: learned(pool, role) for role in trained}
        third = pool.run(3)
        assert pool.resources("w0")["rollout"].version == 3
    assert skipped["samples"].value == 0
    assert skipped["data/dropped_prompts"].value == 8
    assert skipped["policy/empty_minibatches"].value == 2
    for role in trained:
        assert before[role].keys() == after[role].keys()
        assert all(torch.equal(value, after[role][name]) for name, value in before[role].items())
    assert third["samples"].value == 32
    assert third["policy/empty_minibatches"].value == 0
    assert pq.read_table(tmp_path / "run" / "rollouts" / "step=000002").num_rows == 0


def test_a_worker_without_rows_learns_with_those_that_have_some(digits_task, tmp_path):
    with planned(grpo, digits_task, tmp_path, 2, (1, 0, 2)) as pool:
        metrics = pool.run(1)
    assert metrics["samples"].value == 16
    assert metrics["data/dropped_prompts"].value == 4
    assert metrics["policy/empty_minibatches"].value < 2
