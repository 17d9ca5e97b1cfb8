"""A run that stops and goes on gives what it would have given without a stop."""

import shutil
from dataclasses import replace

import pytest
import yaml
from siirl_storage import complete_parts

from siirl_dask import Role
from siirl_dask.config.file import shipped
from siirl_dask.errors import CheckpointError, ConfigError, RunError
from siirl_dask.observe import Status, write_summary
from siirl_dask.runs.checkpoints import checkpoint_url, committed, read_state
from siirl_dask.training.files.checkpoint import read_model

EXACT = ["row_id", "group_id", "prompt", "response_ids", "reward", "weights_version"]
LOSSES = ["policy/loss", "policy/grad_norm", "critic/loss", "policy/lr", "data/drawn_prompts"]
ONE = ["cluster.workers=1", "cluster.placement={}"]
STEPS = 4
HALF = ["run.steps=2", "checkpoint.every=2"]
WHOLE = [f"run.steps={STEPS}", "checkpoint.every=2"]


def weights(run, role="policy"):
    return read_model(f"{checkpoint_url(str(run.url), committed(str(run.url))[-1])}/{role}")


def check_same(straight, resumed, roles=("policy",), tolerance=0.0, steps=STEPS):
    """Rows exactly; losses and weights within ``tolerance``, 0 for the same bits."""
    for step in range(1, steps + 1):
        expected, got = straight.table("rollouts", step), resumed.table("rollouts", step)
        assert got.select(EXACT).equals(expected.select(EXACT)), step
    records = [run.records() for run in (straight, resumed)]
    assert [record["step"] for record in records[1]] == list(range(1, steps + 1))
    for expected, got in zip(*records, strict=True):
        for name in set(LOSSES) & set(expected["metrics"]):
            assert got["metrics"][name] == pytest.approx(
                expected["metrics"][name], abs=tolerance, rel=0
            ), name
    for role in roles:
        expected, got = weights(straight, role), weights(resumed, role)
        assert expected.keys() == got.keys()
        for name, tensor in expected.items():
            assert (got[name] - tensor).abs().max() <= tolerance, (role, name)


@pytest.fixture
def with_kl(tmp_path):
    """The quickstart with a KL to a reference in the reward, whose coefficient follows a target
    quickly.
    """
    reference = {
        "build": "siirl_dask.training:build_reference",
        "with": {"model": "${model}", "trainer": "${trainer}", "rollout": "${rollout}"},
    }
    controller = {
        "build": "siirl_dask.algorithms:build_kl_controller",
        "with": {"coefficient": 0.1, "target": 0.01, "horizon": 64.0},
    }
    node = {
        "run": "siirl_dask.nodes:reference_logprobs",
        "role": "reference",
        "after": "rollout",
        "rows": "balanced",
    }
    kl = {
        "run": "siirl_dask.nodes:penalise_kl",
        "role": "kl",
        "after": ["old_logprobs", "reference_logprobs"],
    }
    nodes = {"reference_logprobs": node, "kl": kl, "advantage": {"after": ["reward", "kl"]}}
    file = tmp_path / "kl.yaml"
    roles = {"reference": reference, "kl": controller}
    file.write_text(
        yaml.safe_dump({"base": str(shipped("quickstart")), "roles": roles, "nodes": nodes})
    )
    return file


@pytest.fixture
def with_baselines(tmp_path):
    """The quickstart with a running baseline in place of a group's mean."""
    role = {"build": "siirl_dask.algorithms:build_role_baselines"}
    node = {
        "run": "siirl_dask.nodes:estimate_role_advantages",
        "role": "baselines",
        "with": {"by": [], "advantage": None},
    }
    file = tmp_path / "baselines.yaml"
    changes = {"roles": {"baselines": role}, "nodes": {"advantage": node}}
    file.write_text(yaml.safe_dump({"base": str(shipped("quickstart")), **changes}))
    return file


def check_resumes_exactly(train, config_file, roles):
    straight = train("straight", *ONE, *WHOLE, config_file=config_file)
    train("resumed", *ONE, *HALF, config_file=config_file)
    between = read_state(str(straight.url), 2)
    assert between.roles == sorted(roles)
    assert read_state(str(straight.url.parent / "resumed"), 2).positions == between.positions
    resumed = train("resumed", *ONE, *WHOLE, config_file=config_file)
    check_same(straight, resumed, roles)
    assert resumed.summary.steps == STEPS
    assert read_state(str(straight.url), STEPS).states == read_state(str(resumed.url), STEPS).states
    return between


def test_with_a_critic_every_bit_is_the_same_on_one_worker(train):
    check_resumes_exactly(train, shipped("quickstart_ppo"), ["policy", "critic"])


def test_after_prompts_were_drawn_anew_it_goes_on_with_the_next(train):
    between = check_resumes_exactly(train, shipped("quickstart_dapo"), ["policy"])
    assert between.positions["train"] > 2 * 8


def test_a_kl_coefficient_is_restored_and_the_reference_not_saved(train, with_kl):
    between = check_resumes_exactly(train, with_kl, ["policy"])
    assert between.states["kl"]["coefficient"] != 0.1


@pytest.mark.slow
def test_the_baselines_of_roles_are_restored(train, with_baselines):
    between = check_resumes_exactly(train, with_baselines, ["policy"])
    assert between.states["baselines"]["baselines"][""] != 0


def test_half_the_workers_go_on_after_a_crash_and_no_step_is_of_two_layouts(train, tmp_path):
    """The first step after the checkpoint is damaged, so both are done anew: one part replaces
    two.
    """
    straight = train("straight", *WHOLE)
    shutil.copytree(straight.url, tmp_path / "resumed")
    shutil.rmtree(checkpoint_url(str(tmp_path / "resumed"), STEPS))
    (tmp_path / "resumed" / "summary.json").unlink()
    (tmp_path / "resumed" / "rollouts" / "step=000003" / "part-0001-00001.parquet").unlink()
    few = ["cluster.workers=2", "cluster.placement={rollout: [0], reward: [0], policy: [1]}"]
    resumed = train("resumed", *few, *WHOLE)
    check_same(straight, resumed, tolerance=1e-6)
    parts = [complete_parts(f"{resumed.url}/rollouts/step={step:06d}") for step in (1, 2, 3, 4)]
    assert [len(names) for names in parts] == [2, 2, 1, 1]


def test_a_changed_config_needs_force_and_fresh_begins_anew(train, capsys):
    first = train("run", *ONE, "run.steps=1")
    note = first.url / "notes.txt"
    note.write_text("mine")
    with pytest.raises(
        ConfigError, match=r"differs.*: rollout\.temperature: 1\.0 -> 0\.9; .*--force"
    ):
        train("run", *ONE, "run.steps=2", "rollout.temperature=0.9")
    with pytest.raises(ConfigError, match=r"finished after 1 step: raise run\.steps=1"):
        train("run", "run.steps=1")
    forced = train(
        "run", *ONE, "run.steps=2", "rollout.temperature=0.9", "observe.progress=true", force=True
    )
    assert "going on after step 1" in capsys.readouterr().out
    assert committed(str(first.url)) == [1, 2]
    assert (forced.summary.steps, len(forced.records())) == (2, 2)
    anew = train("run", *ONE, "run.steps=1", fresh=True)
    assert (anew.summary.steps, len(anew.records()), committed(str(anew.url))) == (1, 1, [1])
    assert not (anew.url / "rollouts" / "step=000002").exists()
    assert note.read_text() == "mine"


def test_a_run_killed_before_its_first_checkpoint_and_its_first_rows_begins_anew(
    train, digits_task
):
    validated = [f"validation.url={digits_task.validation}", "validation.every=1"]
    killed = train("run", "cluster.workers=4", "run.steps=2", *validated)
    shutil.rmtree(killed.url / "checkpoints")
    shutil.rmtree(killed.url / "rollouts")
    (killed.url / "summary.json").unlink()
    anew = train("run", *ONE, "run.steps=1", *validated)
    parts = {path.relative_to(anew.url).as_posix() for path in anew.url.rglob("part-*")}
    part = "part-0002-00000.parquet"
    assert parts == {
        f"rollouts/step=000001/{part}",
        *(
            f"{table}/step=00000{step}/{part}"
            for table in ("validation", "trace")
            for step in (0, 1)
        ),
    }
    steps = [
        [record["step"] for record in anew.records(phase)] for phase in ("train", "validation")
    ]
    assert steps == [[1], [0, 1]]
    more = train("run", *ONE, "run.steps=2", *validated)
    assert [record["step"] for record in more.records("validation")] == [0, 1, 2]
    assert more.summary.validation.first == anew.summary.validation.first


LOST = [*ONE, "checkpoint.every=2", "storage.durability=none"]


@pytest.mark.parametrize(
    "also", [(), ("metrics.jsonl",), ("attempts",), ("summary.json", "attempts")], ids=str
)
def test_a_run_whose_checkpoints_are_gone_does_not_begin_anew_by_itself(train, also):
    """As after a sync without them: rows and metrics stay as they are, until --fresh says
    otherwise.
    """
    run = train("run", *LOST, "run.steps=4")
    for name in ("checkpoints", *also):
        path = run.url / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    (run.url / "summary.json").unlink(missing_ok=True)
    before = sorted(path for path in run.url.rglob("*.parquet"))
    lines = None if "metrics.jsonl" in also else (run.url / "metrics.jsonl").read_bytes()
    if lines is None:
        write_summary(str(run.url), replace(run.summary, status=Status.FAILED))
    with pytest.raises(
        CheckpointError,
        match=r"a run of 4 steps with checkpoint\.every=2, .*checkpoints is gone.*--fre",
    ):
        train("run", *LOST, "run.steps=6")
    assert sorted(path for path in run.url.rglob("*.parquet")) == before
    assert lines is None or (run.url / "metrics.jsonl").read_bytes() == lines
    anew = train("run", *LOST, "run.steps=1", fresh=True)
    assert [record["step"] for record in anew.records()] == [1]


def test_a_run_killed_while_it_wrote_its_first_checkpoint_begins_anew(train):
    """A store may show nothing of it but that it was begun."""
    run = train("run", *LOST, "run.steps=3")
    shutil.rmtree(run.url / "checkpoints")
    (run.url / "summary.json").unlink()
    folder = run.url / "checkpoints" / "step=000002-0001"
    folder.mkdir(parents=True)
    (folder / "BEGUN").touch()
    again = train("run", *LOST, "run.steps=4")
    assert [record["step"] for record in again.records()] == [1, 2, 3, 4]


def test_lines_of_steps_before_the_checkpoint_that_are_gone_are_named(train, caplog):
    run = train("run", *ONE, "run.steps=2")
    (run.url / "metrics.jsonl").unlink()
    more = train("run", *ONE, "run.steps=3")
    assert "metrics.jsonl has no lines of 2 of the 2 steps before the checkpoint" in caplog.text
    assert [more.table("rollouts", step).num_rows > 0 for step in (1, 2, 3)] == [True, True, True]


def fails_to_build(device, rank):
    raise MemoryError("no room for it")


def test_a_resumed_run_that_fails_before_its_first_step_says_why(train):
    train("run", *ONE, "run.steps=1")
    trouble = Role("trouble", fails_to_build)
    with pytest.raises(RunError, match="MemoryError: no room for it"):
        train("run", *ONE, "run.steps=2", change=lambda dag: dag.add(roles=(trouble,)), force=True)


def test_the_best_checkpoint_is_kept_and_an_unknown_metric_refused(train, digits_task):
    best = "checkpoint.keep_best=validation/reward/mean"
    with pytest.raises(ConfigError, match="there is no validation"):
        train("none", best)
    validated = [
        *ONE,
        f"validation.url={digits_task.validation}",
        "validation.every=2",
        "checkpoint.every=1",
    ]
    with pytest.raises(ConfigError, match="did you mean 'validation/reward/mean'"):
        train("typo", *validated, f"{best}s")
    run = train("best", *validated, best, "checkpoint.keep=1", "run.steps=5", "trainer.lr=5e-2")
    means = {
        record["step"]: record["metrics"]["reward/mean"] for record in run.records("validation")
    }
    chosen = max((step for step in means if step), key=lambda step: (means[step], -step))
    assert committed(str(run.url)) == sorted({chosen, 5})


def test_a_folder_that_cannot_be_written_fails_the_run_by_name(train, tmp_path):
    (tmp_path / "run" / "checkpoints" / "step=000001-0001").mkdir(parents=True)
    (tmp_path / "run" / "checkpoints" / "step=000001-0001" / "policy").write_text("in the way")
    with pytest.raises(
        CheckpointError, match=r"checkpoint step 1: .*step=000001-0001/policy could not be written"
    ):
        train("run", "run.steps=3", "checkpoint.every=1")
    assert committed(str(tmp_path / "run")) == []
