"""Two agents train: the same rows wherever they act, a checkpoint of both policies, runs that go
on after a stop.
"""

import json
import os
import signal
from functools import partial

import pytest

from siirl_dask import agents
from siirl_dask.cli import main
from siirl_dask.config.file import shipped
from siirl_dask.errors import PlanError
from siirl_dask.recipes.marft import marft
from siirl_dask.runs.checkpoints import checkpoint_url, committed
from siirl_dask.tasks.splitting import ask_to_sort
from siirl_dask.training.files.checkpoint import read_model
from tests.conftest import Finished

AGENTS = shipped("quickstart_agents.yaml")
EXACT = [
    "row_id",
    "group_id",
    "episode_id",
    "agent",
    "segment",
    "prompt_text",
    "response_ids",
    "reward",
]
EXACT += ["weights_version", "sampling_seed", "tokens"]
ONE = ["cluster.workers=1", "cluster.placement={}"]
APART = {
    "two": [
        "cluster.workers=2",
        "cluster.placement={rollout_a: [0], policy_a: [0], rollout_b: [1], policy_b: [1]}",
    ],
    "three": [
        "cluster.workers=3",
        "cluster.placement={rollout_a: [0, 1], rollout_b: [1, 2], policy_a: [2, 0], policy_b: [1], "
        "reward: [2]}",
    ],
}


@pytest.fixture
def play(train, digits_task):
    """Train two agents on the digits task: two copies of one random model."""

    def start(name, *overrides, message=ask_to_sort, **how):
        recipe = how.pop("recipe", agents)
        # whatever steps are to come
        own = [f"agents.b.model.path={digits_task.model}", "trainer.schedule=constant"]
        return train(
            name, *own, *overrides, config_file=AGENTS, dag=partial(recipe, message=message), **how
        )

    return start


def check_same(one, other, steps):
    for step in range(1, steps + 1):
        expected, got = one.table("rollouts", step), other.table("rollouts", step)
        assert got.select(EXACT).equals(expected.select(EXACT)), step
        flat = [
            table["rollout_logprobs"].combine_chunks().flatten().to_pylist()
            for table in (expected, got)
        ]
        assert flat[1] == pytest.approx(flat[0], abs=1e-5), step


def policies(run):
    url = checkpoint_url(str(run.url), committed(str(run.url))[-1])
    return {role: read_model(f"{url}/{role}") for role in ("policy_a", "policy_b")}


def test_rows_are_the_same_wherever_the_agents_act(play):
    two, three = (play(name, *places, "run.steps=2") for name, places in APART.items())
    check_same(two, three, steps=2)
    first = two.table("rollouts", 1)
    assert first["agent"].to_pylist() == ["a", "b"] * 32
    turns = first.to_pylist()
    for mine, other in zip(turns[::2], turns[1::2], strict=True):
        assert other["prompt_text"] == f"Sort:{mine['response']} ="
        assert mine["episode_id"] == other["episode_id"]
        assert mine["reward"] == other["reward"]
    for record, other in zip(two.records(), three.records(), strict=True):
        for name in (
            "a/policy/loss",
            "b/policy/loss",
            "a/response/length",
            "b/response/length",
            "reward/mean",
        ):
            assert other["metrics"][name] == pytest.approx(record["metrics"][name], abs=1e-5), name
        assert not {"policy/loss", "response/length"} & set(record["metrics"])
        assert record["metrics"]["samples"] == 64


@pytest.mark.slow
def test_a_run_of_two_agents_goes_on_from_the_checkpoint_of_both(play, tmp_path):
    straight = play("straight", *ONE, "run.steps=4", "checkpoint.every=2")
    play("resumed", *ONE, "run.steps=2", "checkpoint.every=2")
    resumed = play("resumed", *ONE, "run.steps=4", "checkpoint.every=2")
    check_same(straight, resumed, steps=4)
    expected, got = policies(straight), policies(resumed)
    for role, tensors in expected.items():
        assert all(got[role][name].equal(tensor) for name, tensor in tensors.items()), role
    assert any(
        not expected["policy_a"][name].equal(tensor)
        for name, tensor in expected["policy_b"].items()
    )
    main(["export", str(resumed.url), str(tmp_path / "b"), "--role", "policy_b"])
    assert (tmp_path / "b" / "config.json").exists()


@pytest.mark.slow
def test_agents_over_one_base_learn_as_those_with_a_base_each(play, tmp_path):
    """They have the same numbers to the last bit, and so has a run that began with a base each
    and goes on with one.
    """
    lora = [
        "trainer.lora.rank=4",
        "trainer.lr=3e-3",
        "checkpoint.every=2",
        "algorithm.kl_coefficient=0.001",
    ]
    straight = play("straight", *ONE, *lora, "run.steps=4")
    play("resumed", *ONE, *lora, "run.steps=2")
    resumed = play("resumed", *ONE, *lora, "run.steps=4", "agents.b.base=a", force=True)
    for step in range(1, 5):
        expected, got = straight.table("rollouts", step), resumed.table("rollouts", step)
        assert got.select([*EXACT, "rollout_logprobs"]).equals(
            expected.select([*EXACT, "rollout_logprobs"])
        ), step
    expected, got = policies(straight), policies(resumed)
    for role, tensors in expected.items():
        assert {name.split(".")[-2] for name in tensors} == {"lora_A", "lora_B"}
        assert all(got[role][name].equal(tensor) for name, tensor in tensors.items()), role
    assert any(
        not tensor.equal(expected["policy_a"][name])
        for name, tensor in expected["policy_b"].items()
    )
    assert {"a/policy/loss", "b/policy/loss"} < resumed.records()[-1]["metrics"].keys()
    main(["export", str(resumed.url), str(tmp_path / "b"), "--role", "policy_b", "--adapter"])
    assert (tmp_path / "b" / "adapter_model.safetensors").exists()
    main(["export", str(resumed.url), str(tmp_path / "merged"), "--role", "policy_a"])
    assert (tmp_path / "merged" / "config.json").exists()
    places = (
        "cluster.placement={rollout_a: [0, 2], rollout_b: [0, 2], policy_a: [1, 2], policy_b: [1, "
        "2], reward: [1]}"
    )
    three = play(
        "three",
        "cluster.workers=3",
        places,
        "agents.b.base=a",
        "trainer.backend=fsdp",
        *lora,
        "run.steps=4",
    )
    check_same(straight, three, steps=4)
    wrong = places.replace("rollout_b: [0, 2]", "rollout_b: [0]")
    with pytest.raises(
        PlanError,
        match=r"roles 'rollout_a' and 'rollout_b' hold the engine of 'a' .* together, and are",
    ):
        play("wrong", "cluster.workers=3", wrong, "agents.b.base=a", *lora)


TOKENS = [
    "algorithm.advantage=siirl_dask.algorithms:marft_tokens",
    "agents.b.base=a",
    "trainer.lora.rank=4",
]
ACTIONS = [
    "algorithm.advantage=siirl_dask.algorithms:marft",
    "algorithm.loss=siirl_dask.algorithms:turn_clip",
]


@pytest.mark.slow
@pytest.mark.parametrize(
    "level", [ACTIONS, TOKENS], ids=["action level", "token level, over one base"]
)
def test_agents_with_one_critic_have_the_same_rows_and_losses_wherever_they_act(level, play):
    placed = {role: [0, 1] for role in ("rollout_a", "rollout_b", "policy_a", "policy_b")}
    apart = ["cluster.workers=3", f"cluster.placement={placed | {'critic': [2], 'reward': [1]}}"]
    one, other = (
        play(name, *how, *level, "run.steps=3", recipe=marft)
        for name, how in {"one": ONE, "apart": apart}.items()
    )
    check_same(one, other, steps=3)
    for record, also in zip(one.records(), other.records(), strict=True):
        for name in ("a/policy/loss", "b/policy/loss", "critic/loss", "critic/grad_norm"):
            assert also["metrics"][name] == pytest.approx(record["metrics"][name], abs=1e-5), name
            assert record["metrics"][name] != 0


@pytest.mark.slow
def test_two_agents_learn_from_one_critic(play):
    settings = ["algorithm.minibatches=1", "critic.lr=3e-3", "rollout.n=16", "run.steps=16"]
    run = play("run", *ONE, *ACTIONS, *settings, recipe=marft)
    rewards = [record["metrics"]["reward/mean"] for record in run.records()]
    assert sum(rewards[-3:]) > 2.5 * sum(rewards[:3])  # 0.17 each, after 0.04


@pytest.mark.slow
def test_a_run_of_two_agents_that_was_killed_goes_on_and_gives_the_same_rows(
    start, digits_task, play
):
    settings = [*ONE, "run.steps=5", "checkpoint.every=2", "trainer.schedule=constant"]
    settings += [f"agents.b.model.path={digits_task.model}"]
    straight = play("straight", *settings)
    killed = start(*settings, config=AGENTS)
    killed.wait_for_steps(3)
    os.killpg(killed.process.pid, signal.SIGKILL)
    killed.process.wait()
    resumed = start(*settings, config=AGENTS)
    resumed.end(120)
    assert resumed.process.returncode == 0
    check_same(straight, Finished(resumed.url, None), steps=5)
    assert json.loads((resumed.url / "summary.json").read_text())["status"] == "complete"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["shared", "solvers", "rounds"])
def test_other_arrangements_train_and_do_not_depend_on_the_workers(kind, play):
    overrides = {"shared": ["agents.b.share=a"], "solvers": ["agents.b.rollout.n=3"], "rounds": []}[
        kind
    ]
    how = {"recipe": partial(agents, rounds=2)} if kind == "rounds" else {}
    one = play("one", *ONE, *overrides, "run.steps=2", **how)
    other = play(
        "other", "cluster.workers=3", "cluster.placement={}", *overrides, "run.steps=2", **how
    )
    check_same(one, other, steps=2)
    table = one.table("rollouts", 1)
    counts = {agent: table["agent"].to_pylist().count(agent) for agent in "ab"}
    assert (
        counts
        == {
            "shared": {"a": 32, "b": 32},
            "solvers": {"a": 32, "b": 96},
            "rounds": {"a": 64, "b": 64},
        }[kind]
    )
    learns = {name for name in one.records()[0]["metrics"] if name.endswith("policy/loss")}
    assert learns == ({"a/policy/loss"} if kind == "shared" else {"a/policy/loss", "b/policy/loss"})


@pytest.mark.slow
def test_the_validation_answers_with_both_and_eval_and_replay_refuse_by_name(
    digits_task, train, capsys
):
    url = f"validation.url={digits_task.validation}"
    how = {"config_file": AGENTS, "dag": partial(agents, message=ask_to_sort)}
    run = train(
        "run",
        f"agents.b.model.path={digits_task.model}",
        *ONE,
        url,
        "validation.every=1",
        "run.steps=1",
        **how,
    )
    assert run.summary.validation.last is not None
    with pytest.raises(SystemExit, match="2"):
        main(["eval", str(run.url), "--data", str(digits_task.test)])
    assert "has the agents ['a', 'b'], and eval samples from one model" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main(["replay", str(run.url), "--from", "reward"])
    assert "node 'turns' makes rows of its own" in capsys.readouterr().err
    main(["report", str(run.url), "-o", str(run.url / "report.html")])
    page = (run.url / "report.html").read_text()
    assert "a: policy loss" in page
    assert "b: policy loss" in page
    main(
        [
            "rollouts",
            str(run.url),
            "SELECT agent, count(*) AS n FROM rollouts GROUP BY agent ORDER BY agent",
        ]
    )
    assert "32" in capsys.readouterr().out
