"""Agents written with the openai client train: the same rows on any number of workers, exact
log-probs, clean ends.
"""

import signal
from functools import partial

import pytest

from siirl_dask import grpo
from siirl_dask.nodes import run_agents
from tests.nodes import living

EXACT = ["row_id", "group_id", "episode_id", "segment", "prompt_ids", "response_ids", "response_mask", "token_versions",
         "turns", "sampling_seed", "reward", "advantage", "weights_version"]  # fmt: skip


def with_agent(agent, **options):
    def dag(config):
        asks = {"endpoint": config.endpoint, "max_prompt_length": 64, "agent": agent, **options}
        changed = grpo(config).replace("rollout", fn=run_agents, options=asks)
        return changed.replace("advantage", after=("rollout", "old_logprobs")).without("reward")

    return dag


def test_rows_are_the_same_on_one_worker_and_on_two_and_train(train):
    where = {"one": "1", "two": "2"}
    settings = ["rollout.max_response_length=64", "data.batch_size=4", "rollout.n=2", "run.steps=2"]
    one, two = (
        train(
            name,
            *settings,
            f"cluster.workers={workers}",
            "cluster.placement={}",
            dag=with_agent(living.counts_digits),
        )
        for name, workers in where.items()
    )
    for step in (1, 2):
        expected, got = one.table("rollouts", step), two.table("rollouts", step)
        assert got.select(EXACT).equals(expected.select(EXACT)), step
        assert {len(turns) for turns in got["turns"].to_pylist()} == {2}
        for row in got.to_pylist():
            ours, theirs = (
                [score for score, own in zip(row[name], row["response_mask"], strict=True) if own]
                for name in ("rollout_logprobs", "old_logprobs")
            )
            assert ours == pytest.approx(theirs, abs=1e-5)
    for expected, got in zip(one.records(), two.records(), strict=True):
        assert got["metrics"]["policy/grad_norm"] > 0
        for name in ("policy/loss", "reward/mean"):
            assert got["metrics"][name] == pytest.approx(expected["metrics"][name], abs=1e-5)


@pytest.mark.slow
def test_agents_that_have_not_begun_are_taken_over_and_their_rows_are_the_same(train, tmp_path):
    """One worker is slow, and lets one agent run at a time."""
    settings = ["rollout.max_response_length=64", "data.batch_size=4", "rollout.n=2", "run.steps=1"]
    runs = []
    for workers in (1, 2):
        slow = partial(
            living.counts_digits_slowly_on_one_worker, noted=str(tmp_path / f"slow{workers}")
        )
        given = [
            *settings,
            f"cluster.workers={workers}",
            "cluster.placement={}",
            "endpoint.max_open=1",
        ]
        runs.append(train(str(workers), *given, dag=with_agent(slow)))
    one, two = (run.table("rollouts", 1) for run in runs)
    assert two.select(EXACT).equals(one.select(EXACT))
    assert runs[1].records()[0]["metrics"]["rollout/taken_over"] > 0
    assert len({*two["worker"].to_pylist()}) == 2


@pytest.mark.slow
def test_an_agent_learns(train):
    settings = [
        "rollout.max_response_length=64",
        "run.steps=10",
        "data.batch_size=16",
        "rollout.n=8",
    ]
    fast = [
        "trainer.warmup_steps=0",
        "trainer.lr=4e-3",
        "cluster.workers=2",
        "cluster.placement={}",
    ]
    finished = train("learns", *settings, *fast, dag=with_agent(living.counts_digits))
    rewards = [record["metrics"]["reward/mean"] for record in finished.records()]
    assert sum(rewards[-3:]) > sum(rewards[:3]) + 0.3, rewards


HANGING = """
base: {base}
nodes:
  rollout:
    run: siirl_dask.nodes:run_agents
    with:
      endpoint: "${{endpoint}}"
      max_prompt_length: "${{data.max_prompt_length}}"
      agent: {living}:notes_and_hangs
  reward: null
  advantage: {{after: [rollout, old_logprobs]}}
"""


@pytest.mark.sweep
@pytest.mark.parametrize("workers", [1, 2])
def test_ctrl_c_ends_a_run_whose_agents_wait(start, tmp_path, monkeypatch, workers):
    from siirl_dask.config.file import shipped

    config = tmp_path / "hangs.yaml"
    config.write_text(HANGING.format(base=shipped("quickstart.yaml"), living=living.__file__))
    settings = [f"cluster.workers={workers}", "cluster.placement={}", "endpoint.timeout=500"]
    monkeypatch.setenv("NOTED", str(tmp_path / "noted"))
    run = start(*settings, config=config)
    run.wait_until((tmp_path / "noted").exists)
    run.process.send_signal(signal.SIGINT)
    seconds, _, err = run.end(timeout=30)
    assert seconds < 15 * run.slowdown, err
