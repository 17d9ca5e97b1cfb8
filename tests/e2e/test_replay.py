"""A run that was cut short replays the steps whose rows are stored: nothing of them is generated,
and it ends as a straight run does.
"""

import shutil
import time
from functools import partial
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from siirl_storage import complete_parts

from siirl_dask.config import ImagesConfig, RolloutConfig
from siirl_dask.config.file import shipped
from siirl_dask.errors import RunError
from siirl_dask.nodes import generate, sample_until_mixed
from siirl_dask.planner import Node, columns
from siirl_dask.planner.contract import bare
from siirl_dask.runs.checkpoints import checkpoint_url, committed, read_state
from tests.clusters import local_cluster
from tests.conftest import Finished
from tests.e2e.test_resume import EXACT, ONE, STEPS, WHOLE, check_same, weights, with_kl  # noqa: F401

TIMES = (
    "seconds",
    "step_seconds",
    "bytes/",
    "samples_per_second",
    "tokens_per_second",
    "rollout/busy",
    "rollout/longest",
)
FOUR = "cluster.placement={rollout: [0, 1], reward: [0, 1], policy: [2, 3]}"


def generate_and_note(ctx, table, *, rollout: RolloutConfig, notes):
    with Path(notes).open("a") as file:  # outside of the process, which may be killed
        file.write(f"{ctx.step}\n")
    return generate(ctx, table, rollout=rollout)


generate_and_note.__contract__ = generate.__contract__


def sample_and_note(
    ctx,
    table,
    *,
    notes,
    rollout: RolloutConfig,
    max_prompt_length,
    batch_size,
    rounds=10,
    scorer="reward",
    columns=(),
    images: ImagesConfig | None = None,
    continue_answers=False,
):
    with Path(notes).open("a") as file:
        file.write(f"{ctx.step}\n")
    return sample_until_mixed(
        ctx,
        table,
        rollout=rollout,
        max_prompt_length=max_prompt_length,
        batch_size=batch_size,
        rounds=rounds,
        scorer=scorer,
        columns=columns,
        images=images,
        continue_answers=continue_answers,
    )


sample_and_note.__contract__ = sample_until_mixed.__contract__


@columns()
def fail_once_stored(ctx, table, *, run):
    """Fail in step 4, once, when the rows that it generated are stored."""
    marker, deadline = Path(f"{run}-failed"), time.monotonic() + 60
    if ctx.step == STEPS and not marker.exists():
        while not [*Path(run, "stages", "rollout", f"step={STEPS:06d}").glob("_parts-*.json")]:
            assert time.monotonic() < deadline, "the rows were never stored"
            time.sleep(0.01)
        marker.touch()
        raise RuntimeError("the plug was pulled")
    return table


def failing(dag, run):
    """Return the DAG with a node between generation and all that uses its rows."""
    plug = Node(
        "plug", fail_once_stored, role="rollout", after="rollout", options={"run": str(run)}
    )
    late = [node for node in dag.nodes if "rollout" in node.after]
    dag = dag.add(plug)
    for node in late:
        dag = dag.replace(
            node.name, after=tuple("plug" if name == "rollout" else name for name in node.after)
        )
    return dag


@pytest.fixture
def noting(tmp_path):
    """A change of a DAG whose rollouts are noted, and the steps that were generated so far, in
    order.
    """
    notes = tmp_path / "generated"

    def change(dag):
        node = dag.node("rollout")
        fn = generate_and_note if bare(node.fn) is generate else sample_and_note
        return dag.replace("rollout", fn=partial(fn, notes=str(notes), **node.options))

    def steps():
        return sorted({int(line) for line in notes.read_text().split()}) if notes.exists() else []

    return change, steps, notes.unlink


def copied(run):
    """The run as it has ended, to compare with what becomes of it once it is cut short: two runs of
    one config are equal to the bit (test_resume.py).
    """
    url = run.url.with_name(f"{run.url.name}-straight")
    return Finished(shutil.copytree(run.url, url), run.summary)


def cut_short(run, logged=STEPS, kept=1):
    """Make a finished run one that was killed when it had stored the rows of its last step, and
    logged ``logged``.
    """
    for step in committed(str(run.url))[kept:]:
        shutil.rmtree(checkpoint_url(str(run.url), step))
    (run.url / "summary.json").unlink()
    log = run.url / "metrics.jsonl"
    lines = log.read_text().splitlines(keepends=True)
    log.write_text(
        "".join(
            line for line in lines if any(f'"step": {step},' in line for step in range(logged + 1))
        )
    )


def results(run, phase="train"):
    """All that was measured but times."""
    return [
        {name: value for name, value in record["metrics"].items() if not name.startswith(TIMES)}
        for record in run.records(phase)
    ]


def written(run):
    """Every part of the saved samples, and when it was written."""
    return {path: path.stat().st_mtime_ns for path in (run.url / "rollouts").rglob("part-*")}


def check_replays(train, config_file, roles):
    killed = train("resumed", *ONE, *WHOLE, config_file=config_file)
    straight = copied(killed)
    cut_short(killed, logged=STEPS - 1)
    parts = written(killed)
    resumed = train("resumed", *ONE, *WHOLE, config_file=config_file)
    assert written(resumed) == parts, "rows were generated again"
    check_same(straight, resumed, roles)
    assert results(resumed) == results(straight)
    states = [read_state(str(run.url), STEPS) for run in (straight, resumed)]
    assert (states[0].positions, states[0].states) == (states[1].positions, states[1].states)


@pytest.mark.slow
def test_with_a_critic_stored_steps_are_replayed_to_the_bit(train):
    check_replays(train, shipped("quickstart_ppo"), ["policy", "critic"])


@pytest.mark.slow
def test_after_prompts_were_drawn_anew_a_replay_goes_on_with_the_next(train):
    check_replays(train, shipped("quickstart_dapo"), ["policy"])


@pytest.mark.slow
def test_a_kl_coefficient_that_stored_rows_had_changed_is_changed_again(train, with_kl):  # noqa: F811
    check_replays(train, with_kl, ["policy"])


def test_nothing_stored_is_generated_again_and_the_next_step_is(train, noting):
    change, steps, forget = noting
    cut_short(train("run", *ONE, *WHOLE, change=change))
    assert steps() == [1, 2, 3, 4]
    forget()
    longer = train("run", *ONE, "run.steps=5", "checkpoint.every=2", change=change)
    assert steps() == [5]
    assert longer.summary.steps == 5
    straight = train("straight", *ONE, "run.steps=5", "checkpoint.every=2", change=change)
    assert results(longer) == results(straight)


@pytest.mark.slow
def test_without_any_checkpoint_all_stored_steps_are_replayed_and_validations_not_repeated(
    train, noting, digits_task
):
    change, steps, forget = noting
    validated = [*ONE, *WHOLE, f"validation.url={digits_task.validation}", "validation.every=2"]
    killed = train("run", *validated, change=change)
    straight = copied(killed)
    cut_short(killed, kept=0)
    answers = {
        path: path.stat().st_mtime_ns for path in (killed.url / "validation").rglob("part-*")
    }
    forget()
    resumed = train("run", *validated, change=change)
    assert steps() == []
    check_same(straight, resumed)
    assert {
        path: path.stat().st_mtime_ns for path in (resumed.url / "validation").rglob("part-*")
    } == answers
    assert results(resumed, "validation") == results(straight, "validation")


@pytest.mark.parametrize("workers", [2, pytest.param(3, marks=pytest.mark.sweep)])
def test_what_four_workers_stored_others_replay(train, noting, workers):
    change, steps, forget = noting
    straight = train("straight", *WHOLE, FOUR, change=change)
    killed = train("run", *WHOLE, FOUR, change=change)
    cut_short(killed)
    forget()
    fewer = {
        2: "{rollout: [0], reward: [0], policy: [1]}",
        3: "{rollout: [0], reward: [0], policy: [0, 1, 2]}",
    }
    resumed = train(
        "run",
        *WHOLE,
        f"cluster.workers={workers}",
        f"cluster.placement={fewer[workers]}",
        change=change,
    )
    assert steps() == []
    check_same(straight, resumed, tolerance=1e-5)


@pytest.mark.slow
def test_what_four_workers_stored_eight_replay(train, noting):
    change, steps, forget = noting
    killed = train("run", *WHOLE, FOUR, change=change)
    straight = copied(killed)
    cut_short(killed)
    forget()
    with local_cluster(8) as cluster:
        more = [
            f"cluster.address={cluster.scheduler_address}",
            "cluster.workers=8",
            "cluster.placement={}",
        ]
        resumed = train("run", *WHOLE, *more, change=change)
    assert steps() == []
    assert resumed.summary.workers == 8
    check_same(straight, resumed, tolerance=1e-5)


@pytest.mark.slow
def test_rows_ahead_of_training_are_replayed_with_the_weights_that_a_straight_run_has(
    train, noting
):
    change, steps, forget = noting
    ahead = [*WHOLE, "run.steps=6", "checkpoint.every=4", "rollout.max_staleness=1"]
    ahead += ["cluster.workers=2", "cluster.placement={rollout: [0], reward: [0], policy: [1]}"]
    killed = train("run", *ahead, change=change)
    straight = copied(killed)
    cut_short(killed, logged=5)
    shutil.rmtree(killed.url / "rollouts" / "step=000006")
    forget()
    resumed = train("run", *ahead, change=change)
    assert steps() == [6]
    assert results(resumed)[-1] == results(straight)[-1]


def damage(run, table, step):
    """Flip a bit in the middle of the one part of a table's step, and return the part's path."""
    (part,) = (run.url / table / f"step={step:06d}").glob("part-*")
    data = bytearray(part.read_bytes())
    data[len(data) // 2] ^= 1
    part.write_bytes(data)
    return part


def check_goes_on_from_generated_rows(train, noting, tmp_path, roles, config_file):
    """A step fails when its rows are generated, and neither rewarded nor anything else."""
    change, steps, forget = noting
    config = {
        "config_file": config_file,
        "change": lambda dag: failing(change(dag), tmp_path / "run"),
    }
    (tmp_path / "run-failed").touch()
    straight = train("straight", *ONE, *WHOLE, **config)
    (tmp_path / "run-failed").unlink()
    forget()
    with pytest.raises(RunError, match="the plug was pulled"):
        train("run", *ONE, *WHOLE, **config)
    assert steps() == [1, 2, 3, 4]
    assert not [*(tmp_path / "run" / "rollouts").glob("step=000004/*.json")]
    forget()
    resumed = train("run", *ONE, *WHOLE, **config)
    assert steps() == []
    check_same(straight, resumed, roles)
    assert results(resumed) == results(straight)
    states = [read_state(str(run.url), STEPS) for run in (straight, resumed)]
    assert (states[0].positions, states[0].states) == (states[1].positions, states[1].states)
    assert not [*(resumed.url / "stages").rglob("*.parquet")], "rows are stored twice"


def test_a_step_that_failed_before_the_advantage_generates_nothing_again(train, noting, tmp_path):
    check_goes_on_from_generated_rows(train, noting, tmp_path, ["policy"], shipped("quickstart"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "roles"),
    [
        pytest.param("quickstart_ppo", ["policy", "critic"], marks=pytest.mark.sweep),
        ("quickstart_dapo", ["policy"]),
    ],
)
def test_so_it_is_with_a_critic_and_with_prompts_that_were_drawn_anew(
    train, noting, tmp_path, config, roles
):
    check_goes_on_from_generated_rows(train, noting, tmp_path, roles, shipped(config))


def test_of_several_tables_the_furthest_is_taken_and_a_flipped_bit_falls_back_to_the_nearer_one(
    train, noting, caplog, capsys
):
    change, steps, forget = noting
    several = [*ONE, *WHOLE, "nodes.reward.save_as=rewarded", "observe.progress=true"]
    killed = train("run", *several, change=change)
    straight = {step: killed.table("rollouts", step) for step in range(1, STEPS + 1)}
    cut_short(killed)
    shutil.copytree(killed.url, killed.url.parent / "whole")
    part = damage(killed, "rollouts", 4)
    forget()
    capsys.readouterr()
    resumed = train("run", *several, change=change)
    assert f"the rows of step 4 are taken from rewarded: {part} has the SHA-256" in caplog.text
    assert (
        "steps 3 to 4 are replayed from stored rows (step 4 from rewarded): no row"
        in capsys.readouterr().out
    )
    train("whole", *several, change=change)
    assert "steps 3 to 4 are replayed from stored rows: no row" in capsys.readouterr().out
    assert steps() == []
    assert all(resumed.table("rollouts", step).equals(rows) for step, rows in straight.items())
    assert complete_parts(f"{resumed.url}/rollouts/step=000004") == ["part-0002-00000.parquet"]


def test_a_stored_step_that_is_damaged_is_generated_again_and_named(train, noting, caplog):
    change, steps, forget = noting
    straight = train("straight", *ONE, *WHOLE, change=change)
    killed = train("run", *ONE, *WHOLE, change=change)
    cut_short(killed)
    part = damage(killed, "rollouts", 4)
    forget()
    resumed = train("run", *ONE, *WHOLE, change=change)
    assert steps() == [4]
    assert f"the rows of step 4 are generated again: {part} has the SHA-256" in caplog.text
    check_same(straight, resumed)


@pytest.mark.slow
def test_rows_of_another_configuration_are_not_replayed(train, noting):
    change, steps, forget = noting
    cut_short(train("run", *ONE, *WHOLE, change=change))
    forget()
    train("run", *ONE, *WHOLE, "rollout.temperature=0.9", change=change, force=True)
    assert steps() == [3, 4]


@pytest.mark.slow
def test_a_run_that_was_moved_replays_the_rows_that_it_stored_before(train, noting, tmp_path):
    """Its DAG names its folder, so that its identity is another one there."""
    change, steps, forget = noting

    def run(name):
        def plugged(dag):
            return failing(change(dag), tmp_path / name)

        return train(name, *ONE, *WHOLE, change=plugged)

    with pytest.raises(RunError, match="the plug was pulled"):
        run("before")
    assert steps() == [1, 2, 3, 4]
    (tmp_path / "before").rename(tmp_path / "after")
    (tmp_path / "before-failed").rename(tmp_path / "after-failed")
    forget()
    run("after")
    assert not steps(), "all of them were stored"


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_samples_that_were_kept_for_the_next_step_are_part_of_the_stage(
    train, noting, tmp_path, caplog, workers
):
    """Responses take two steps, and the first step that drains comes after the one that fails."""
    change, steps, forget = noting
    given = [
        *ONE,
        "run.steps=5",
        "checkpoint.every=5",
        "rollout.partial=true",
        "rollout.max_tokens_per_step=4",
    ]
    given += ["rollout.max_staleness=1", "rollout.steps_ahead=0"]
    how = {"change": lambda dag: failing(change(dag), tmp_path / "run")}
    (tmp_path / "run-failed").touch()
    straight = train("straight", *given, **how)
    (tmp_path / "run-failed").unlink()
    with pytest.raises(RunError, match="the plug was pulled"):
        train("run", *given, **how)
    kept = tmp_path / "run" / "stages" / "rollout.kept"
    assert [path.name for path in kept.iterdir()] == ["step=000004"]
    assert pq.read_table(kept / "step=000004").num_rows > 0
    lost = shutil.copytree(tmp_path / "run", tmp_path / "lost")
    shutil.rmtree(lost / "stages" / "rollout.kept")
    forget()
    resumed = train("run", *given, f"cluster.workers={workers}", **how)
    assert steps() == [5]
    for step in range(1, 6):
        tables = [
            run.table("rollouts", step).select([*EXACT, "token_versions"])
            for run in (straight, resumed)
        ]
        assert tables[0].equals(tables[1]), step
    if workers == 1:
        assert results(resumed) == results(straight)
        assert all(
            tensor.equal(weights(resumed)[name]) for name, tensor in weights(straight).items()
        )
    else:
        forget()
        again = train("lost", *given, **how)
        assert steps() == [1, 2, 3, 4, 5]
        assert (
            "the rows of steps 1 to 4 are generated again: what node 'rollout' keeps for later"
            in caplog.text
        )
        assert results(again) == results(straight)


@pytest.mark.slow
def test_without_durability_no_rows_are_stored_and_the_steps_are_generated_again(train, noting):
    change, steps, forget = noting
    run = train("run", *ONE, *WHOLE, "storage.durability=none", change=change)
    assert not (run.url / "rollouts").exists()
    cut_short(run)
    forget()
    train("run", *ONE, *WHOLE, "storage.durability=none", change=change)
    assert steps() == [3, 4]
    assert complete_parts(f"{run.url}/rollouts/step=000003") is None


@pytest.mark.parametrize("durability", ["async", pytest.param("sync", marks=pytest.mark.slow)])
def test_rows_that_cannot_be_stored_end_the_run_by_name_also_those_of_its_last_step(
    train, tmp_path, durability
):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "rollouts").write_text("in the way")
    with pytest.raises(
        RunError, match=r"train step 1: its rows could not be stored in .*rollouts/step=000001"
    ):
        train("run", *ONE, "run.steps=1", f"storage.durability={durability}")
