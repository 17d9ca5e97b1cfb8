"""A run that was cut short replays the steps whose rows are stored: nothing of them is generated, and it ends as a
straight run does.
"""

import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from siirl_storage import complete_parts

from siirl_dask.config.file import shipped
from siirl_dask.errors import RunError
from siirl_dask.nodes import generate
from siirl_dask.runs.checkpoints import checkpoint_url, committed, read_state
from tests.clusters import local_cluster
from tests.e2e.test_resume import ONE, STEPS, WHOLE, check_same, with_kl  # noqa: F401

TIMES = ("seconds", "bytes/", "samples_per_second", "tokens_per_second", "rollout/busy", "rollout/longest")
FOUR = "cluster.placement={rollout: [0, 1], reward: [0, 1], policy: [2, 3]}"


def generate_and_note(ctx, table, *, rollout, notes):
    with Path(notes).open("a") as file:  # outside of the process, which may be killed
        file.write(f"{ctx.step}\n")
    return generate(ctx, table, rollout=rollout)


generate_and_note.__contract__ = replace(generate.__contract__, depends_on_options=None)


@pytest.fixture
def noting(tmp_path):
    """A change of a DAG whose rollouts are noted, and the steps that were generated so far, in order."""
    notes = tmp_path / "generated"

    def change(dag):
        return dag.replace("rollout", fn=partial(generate_and_note, notes=str(notes), **dag.node("rollout").options))

    def steps():
        return sorted({int(line) for line in notes.read_text().split()}) if notes.exists() else []

    return change, steps, notes.unlink


def cut_short(run, logged=STEPS, kept=1):
    """Make a finished run one that was killed when it had stored the rows of its last step, and logged ``logged``."""
    for step in committed(str(run.url))[kept:]:
        shutil.rmtree(checkpoint_url(str(run.url), step))
    (run.url / "summary.json").unlink()
    log = run.url / "metrics.jsonl"
    lines = log.read_text().splitlines(keepends=True)
    log.write_text("".join(line for line in lines if any(f'"step": {step},' in line for step in range(logged + 1))))


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
    straight = train("straight", *ONE, *WHOLE, config_file=config_file)
    killed = train("resumed", *ONE, *WHOLE, config_file=config_file)
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
def test_without_any_checkpoint_all_stored_steps_are_replayed_and_validations_not_repeated(train, noting, digits_task):
    change, steps, forget = noting
    validated = [*ONE, *WHOLE, f"validation.url={digits_task.validation}", "validation.every=2"]
    straight = train("straight", *validated, change=change)
    killed = train("run", *validated, change=change)
    cut_short(killed, kept=0)
    answers = {path: path.stat().st_mtime_ns for path in (killed.url / "validation").rglob("part-*")}
    forget()
    resumed = train("run", *validated, change=change)
    assert steps() == []
    check_same(straight, resumed)
    assert {path: path.stat().st_mtime_ns for path in (resumed.url / "validation").rglob("part-*")} == answers
    assert results(resumed, "validation") == results(straight, "validation")


@pytest.mark.parametrize("workers", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_what_four_workers_stored_others_replay(train, noting, workers):
    change, steps, forget = noting
    straight = train("straight", *WHOLE, FOUR, change=change)
    killed = train("run", *WHOLE, FOUR, change=change)
    cut_short(killed)
    forget()
    fewer = {2: "{rollout: [0], reward: [0], policy: [1]}", 3: "{rollout: [0], reward: [0], policy: [0, 1, 2]}"}
    resumed = train("run", *WHOLE, f"cluster.workers={workers}", f"cluster.placement={fewer[workers]}", change=change)
    assert steps() == []
    check_same(straight, resumed, tolerance=1e-5)


@pytest.mark.slow
def test_what_four_workers_stored_eight_replay(train, noting):
    change, steps, forget = noting
    straight = train("straight", *WHOLE, FOUR, change=change)
    killed = train("run", *WHOLE, FOUR, change=change)
    cut_short(killed)
    forget()
    with local_cluster(8) as cluster:
        more = [f"cluster.address={cluster.scheduler_address}", "cluster.workers=8", "cluster.placement={}"]
        resumed = train("run", *WHOLE, *more, change=change)
    assert steps() == []
    assert resumed.summary.workers == 8
    check_same(straight, resumed, tolerance=1e-5)


@pytest.mark.slow
def test_rows_ahead_of_training_are_replayed_with_the_weights_that_a_straight_run_has(train, noting):
    change, steps, forget = noting
    ahead = [*WHOLE, "run.steps=6", "checkpoint.every=4", "rollout.max_staleness=1"]
    ahead += ["cluster.workers=2", "cluster.placement={rollout: [0], reward: [0], policy: [1]}"]
    straight = train("straight", *ahead, change=change)
    killed = train("run", *ahead, change=change)
    cut_short(killed, logged=5)
    shutil.rmtree(killed.url / "rollouts" / "step=000006")
    forget()
    resumed = train("run", *ahead, change=change)
    assert steps() == [6]
    assert results(resumed)[-1] == results(straight)[-1]


def test_a_stored_step_that_is_damaged_is_generated_again_and_named(train, noting, caplog):
    change, steps, forget = noting
    straight = train("straight", *ONE, *WHOLE, change=change)
    killed = train("run", *ONE, *WHOLE, change=change)
    cut_short(killed)
    (part,) = (killed.url / "rollouts" / "step=000004").glob("part-*")
    data = bytearray(part.read_bytes())
    data[len(data) // 2] ^= 1
    part.write_bytes(data)
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
def test_samples_that_are_kept_for_later_steps_are_not_in_stored_rows_and_the_run_says_so(train, capsys):
    partial_rollouts = ["rollout.partial=true", "rollout.max_tokens_per_step=4", "rollout.max_staleness=1"]
    partial_rollouts += ["rollout.steps_ahead=0", "observe.progress=true"]
    cut_short(train("run", *ONE, *WHOLE, *partial_rollouts))
    train("run", *ONE, *WHOLE, *partial_rollouts)
    said = capsys.readouterr().out
    assert "stored steps are not replayed: node 'rollout' keeps rows for later steps" in said


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
def test_rows_that_cannot_be_stored_end_the_run_by_name_also_those_of_its_last_step(train, tmp_path, durability):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "rollouts").write_text("in the way")
    with pytest.raises(RunError, match=r"train step 1: its rows could not be stored in .*rollouts/step=000001"):
        train("run", *ONE, "run.steps=1", f"storage.durability={durability}")
