"""``siirl-dask eval`` end to end: the same on any number of workers, and what the run's own
validation said.
"""

import json
from shutil import copytree

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from siirl_dask.cli import main
from siirl_dask.commands.evaluate import EvalRequest, evaluate
from siirl_dask.config.file import shipped
from tests.e2e.test_openai_agent import with_agent
from tests.nodes import living
from tests.rollout.test_tokenizer import with_bos

SAMPLING = ["validation.n=4", "validation.temperature=1", "validation.source_column=info.source"]
SAME = ["row_id", "prompt", "response", "reward"]
REWARD = "siirl_dask.tasks.sorting:digit_fraction"


@pytest.fixture
def data(tmp_path):
    """Prompts of three lengths and three sources, in uneven row groups."""
    prompts = [f"Digits {'9' * (at % 3 * 4)}{at}:" for at in range(11)]
    info = [{"source": ["a", "b", None][at % 3]} for at in range(11)]
    table = pa.table({"prompt": prompts, "answer": [""] * 11, "info": info})
    pq.write_table(table, tmp_path / "test.parquet", row_group_size=3)
    return str(tmp_path / "test.parquet")


def table_of(out, step):
    return pq.read_table(f"{out}/generations/step={step:06d}").sort_by("row_id")


def test_table_and_numbers_are_the_same_on_any_number_of_workers(
    digits_task, cluster_address, data, tmp_path, capsys
):
    def run(workers):
        out = tmp_path / str(workers)
        options = ["--n=4", "--k=1,2,4", "--temperature=1", "--max-tokens=8", f"--reward={REWARD}"]
        options.append("rollout.engine=transformers")
        placed = [f"--workers={workers}", f"--out={out}", f"cluster.address={cluster_address}"]
        model = [str(digits_task.model), "--data", data]
        main(
            [
                "eval",
                *model,
                *options,
                *placed,
                "validation.source_column=info.source",
                "observe.progress=false",
            ]
        )
        return table_of(out, 0), (out / "metrics.json").read_bytes()

    one, numbers = run(1)
    assert run(2) == (one, numbers)
    assert run(4) == (one, numbers)
    assert one["sample"].to_pylist() == [0, 1, 2, 3] * 11
    assert one["source"].to_pylist()[:12] == ["a"] * 4 + ["b"] * 4 + [None] * 4
    assert len(set(one["response"].to_pylist())) > 22
    found = json.loads(numbers)
    assert found["prompts"] == {"all": 11, "sources": {"a": 4, "b": 4}}
    assert found["metrics"]["mean@4"] == pytest.approx(
        sum(one["reward"].to_pylist()) / 44, abs=1e-12
    )
    kinds = ("mean@4", "pass@1", "pass@2", "pass@4", "best@2", "best@4", "maj@2", "maj@4")
    assert set(found["metrics"]) == {f"{kind}{end}" for kind in kinds for end in ("", "/a", "/b")}
    assert "0." in capsys.readouterr().out


def test_an_evaluation_says_of_its_prompts_what_a_run_says_and_no_secrets(
    digits_task, cluster_address, tmp_path, capsys
):
    model = tmp_path / "model"
    copytree(digits_task.model, model)
    with_bos().save_pretrained(model)
    rows = {"prompt": ["Digits 1:", "x" * 99], "answer": ["", None]}
    data = tmp_path / "data?key=S3CR3T"
    out = tmp_path / "out?key=S3CR3T"
    data.mkdir()
    pq.write_table(pa.table(rows), data / "test.parquet")
    options = ["--data", str(data / "test.parquet"), f"--out={out}", "--max-tokens=2"]
    options += [f"--reward={REWARD}"]
    options += [
        "rollout.engine=transformers",
        f"cluster.address={cluster_address}",
        "data.max_prompt_length=32",
    ]
    main(["eval", str(model), *options])
    said = capsys.readouterr().out
    assert "prompts that are texts get the tokenizer's own special tokens, <s> before each" in said
    assert "1 of 2 prompts are longer than data.max_prompt_length=32" in said
    assert "1 of 2 answers that were looked at are null" in said
    assert "S3CR3T" not in said + (out / "metrics.json").read_text()


def test_a_checkpoint_says_what_validation_said_and_its_export_the_same(
    train, cluster_address, data, tmp_path
):
    settings = [
        "cluster.workers=2",
        "cluster.placement={}",
        "checkpoint.every=1",
        "run.steps=2",
        *SAMPLING,
    ]
    run = train("run", *settings, f"validation.url={data}")
    result, out = evaluate(
        EvalRequest(model=str(run.url), data=data, overrides=["cluster.workers=3"])
    )
    assert (result.step, out) == (2, f"{run.url}/evaluations/test-step000002")
    logged = run.records("validation")[-1]["metrics"]
    assert result.metrics == {name: value for name, value in logged.items() if "@" in name}
    assert table_of(out, 2).select(SAME).equals(run.table("validation", 2).select(SAME))
    main(["export", str(run.url), str(tmp_path / "model"), "--step", "1"])
    greedy = ["validation.n=1", "validation.temperature=0", f"cluster.address={cluster_address}"]
    greedy += [
        "rollout.engine=transformers",
        "rollout.max_response_length=8",
        f"rewards.function={REWARD}",
    ]
    request = {"data": data, "overrides": greedy}
    evaluate(EvalRequest(model=str(run.url), step=1, out=f"{tmp_path}/of run", **request))
    evaluate(EvalRequest(model=str(tmp_path / "model"), out=f"{tmp_path}/of model", **request))
    first = table_of(f"{tmp_path}/of run", 1).select(SAME)
    assert table_of(f"{tmp_path}/of model", 0).select(SAME).equals(first)


EPISODES = ["rollout.max_response_length=24", "environments.turn_tokens=4", "environments.turns=4", "run.steps=1",
            "checkpoint.every=1", "cluster.workers=2", "cluster.placement={}", "validation.n=4",
            "data.max_prompt_length=32"]  # fmt: skip
SPOKEN = ["episode_id", "segment", "turns", "prompt_ids", "response_ids", "response_mask"]


@pytest.mark.slow
def test_a_run_that_plays_is_evaluated_by_playing_and_says_what_validation_said(
    train, data, capsys
):
    """Episodes of several rows; on another number of workers; shown as conversations."""
    world = [
        "environments.environment=tests.e2e.worlds:Rewritten",
        "environments.rows_per_episode=3",
    ]
    given = [
        *EPISODES,
        *world,
        "validation.temperature=1",
        "validation.k=[1,4]",
        f"validation.url={data}",
    ]
    run = train("run", *given, config_file=shipped("quickstart_turns.yaml"))
    result, out = evaluate(
        EvalRequest(model=str(run.url), data=data, overrides=["cluster.workers=3"])
    )
    logged = run.records("validation")[-1]["metrics"]
    assert result.metrics == {name: value for name, value in logged.items() if "@" in name} != {}
    assert (result.samples, result.turns, result.failures) == (44, logged["episodes/turns"], 0)
    assert result.reward == "tests.e2e.worlds:Rewritten"
    rows = table_of(out, 1)
    assert rows.select([*SAME, *SPOKEN]).equals(run.table("validation", 1).select([*SAME, *SPOKEN]))
    assert {*rows["segment"].to_pylist()} == {0, 1}
    by_episode = rows.group_by("episode_id").aggregate([("reward", "sum")])
    assert result.metrics["mean@4"] == pytest.approx(
        sum(by_episode["reward_sum"].to_pylist()) / 44, abs=1e-6
    )
    main(["rollouts", out, "--table", "generations", "--best", "1"])
    shown = capsys.readouterr().out
    assert "policy, turn 1, reward" in shown
    assert "After " in shown
    main(
        [
            "rollouts",
            out,
            "--table",
            "generations",
            "SELECT count(*) AS turns FROM (SELECT unnest(turns) FROM generations)",
        ]
    )
    assert str(round(44 * result.turns)) in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_vllm_evaluates_episodes_as_transformers_does(train, data):
    pytest.importorskip("vllm")
    given = [
        *EPISODES,
        "environments.environment=tests.e2e.worlds:Delayed",
        "validation.temperature=1",
    ]
    run = train("run", *given, config_file=shipped("quickstart_turns.yaml"))
    found = []
    for engine, workers in (("transformers", 2), ("vllm", 1)):
        overrides = [
            f"rollout.engine={engine}",
            f"cluster.workers={workers}",
            "rollout.vllm.kv_cache_memory=16MiB",
        ]
        result, out = evaluate(
            EvalRequest(
                model=str(run.url), data=data, overrides=overrides, out=f"{run.url}-{engine}"
            )
        )
        found.append((result.metrics, result.turns, table_of(out, 1).select([*SAME, *SPOKEN])))
    (expected, turns, rows), (metrics, played, others) = found
    assert (metrics, played) == (expected, turns)
    assert others.equals(rows)
    assert rows.num_rows == 44


def test_episodes_are_evaluated_in_the_world_that_is_asked_for(
    train, data, digits_task, tmp_path, cluster_address
):
    """Another role of the run, other environments by their key, and a model without a run."""
    roles = {
        "build": "siirl_dask.environments:build_environments",
        "with": {
            "environments": "${environments}",
            "environment": "tests.environments.worlds:Sick",
        },
    }
    config = tmp_path / "two.yaml"
    config.write_text(
        f"base: {shipped('quickstart_turns.yaml')}\nroles: {json.dumps({'other': roles})}\n"
    )
    run = train(
        "run", *EPISODES, "environments.environment=tests.e2e.worlds:Delayed", config_file=config
    )
    request = {"model": str(run.url), "data": data}
    other, _ = evaluate(EvalRequest(**request, world="other", out=f"{tmp_path}/other"))
    assert (other.reward, other.turns) == ("tests.environments.worlds:Sick", 3.0)
    named = [
        *EPISODES,
        "environments.environment=tests.environments.worlds:Sick",
        "validation.temperature=1",
    ]
    by_key, _ = evaluate(EvalRequest(**request, overrides=named[-2:], out=f"{tmp_path}/by key"))
    assert (by_key.reward, by_key.metrics) == (other.reward, other.metrics)
    evaluated = [*(text for text in named if "checkpoint" not in text and "run.steps" not in text)]
    evaluated += [
        "rollout.engine=transformers",
        f"cluster.address={cluster_address}",
        "observe.progress=false",
    ]
    model = EvalRequest(
        model=str(digits_task.model), data=data, overrides=evaluated, out=f"{tmp_path}/model"
    )
    assert evaluate(model)[0].turns == 3.0


@pytest.mark.slow
def test_a_run_of_agents_is_evaluated_by_its_agents(train, data):
    settings = [
        "rollout.max_response_length=64",
        "run.steps=1",
        "checkpoint.every=1",
        "cluster.workers=2",
    ]
    run = train("run", *settings, "cluster.placement={}", dag=with_agent(living.counts_digits))
    result, out = evaluate(
        EvalRequest(model=str(run.url), data=data, overrides=["validation.n=2", *SAMPLING[1:2]])
    )
    assert (result.reward, result.samples, result.turns) == (
        "tests.nodes.living:counts_digits",
        22,
        2.0,
    )
    rows = table_of(out, 1)
    assert {len(turns) for turns in rows["turns"].to_pylist()} == {2}
    assert result.metrics["mean@2"] == pytest.approx(sum(rows["reward"].to_pylist()) / 22, abs=1e-6)
