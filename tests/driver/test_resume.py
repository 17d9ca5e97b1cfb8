"""Resuming: the step at which a run begins, and the files of an earlier start that are kept or
removed.
"""

import re
import shutil
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from uuid import uuid4

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from siirl_storage import append, create_table, open_fs, open_table, write_atomic, write_part

import siirl_dask.runs.folder as run_folder
from siirl_dask.cli import main
from siirl_dask.commands import script
from siirl_dask.config import CheckpointConfig
from siirl_dask.config.file import load_config_file, shipped
from siirl_dask.driver.iterations import iterations
from siirl_dask.driver.phases import dags, data_versions, plan_phases, worker_names
from siirl_dask.driver.recovery.resume import (
    ResumePoint,
    check_nothing_lost,
    check_same_data,
    find_resume_point,
    weights_dag,
)
from siirl_dask.errors import CheckpointError, ConfigError, PlanError, counted
from siirl_dask.observe import MetricsLog, Status, Summary, read_metrics, write_summary
from siirl_dask.planner import DAG, columns
from siirl_dask.runs import identity_file
from siirl_dask.runs.attempt import take
from siirl_dask.runs.checkpoint_state import CheckpointState
from siirl_dask.runs.checkpoints import Checkpoints
from siirl_dask.runs.folder import RunIdentity, known_digests, remove_run, write_identity
from siirl_dask.runs.identity_file import (
    DataVersion,
    ModelVersion,
    Relocation,
    note_retention,
    read_identity_file,
    read_retention,
)
from siirl_dask.runs.reader import Run
from siirl_dask.runs.stages import Stage
from siirl_dask.runs.tables import remove_steps, tables_of
from siirl_dask.schema import PARAMETER_DATA, fields
from siirl_dask.wording import redacted

CONFIGS = sorted((Path(__file__).resolve().parents[2] / "configs").glob("*.yaml"))


def config_and_dag(url, *overrides, name="quickstart"):
    file = load_config_file(shipped(name), [f"run.url={url}", *overrides])
    return file.config, dags(file)[0]


@pytest.fixture(params=["local", "memory"])
def url(request, tmp_path):
    return str(tmp_path / "run") if request.param == "local" else f"memory://{uuid4().hex}/run"


def commit(url, step, config, dag):
    with take(url, 30.0, print) as attempt:
        kept = Checkpoints(attempt=attempt, keep=9, done=step)
        state = CheckpointState(
            step=step, roles=["policy"], digest=RunIdentity.of(config, dag).digest()
        )
        kept.commit(kept.folder(step), state, {})


def begin(url, *overrides, fresh=False, force=False):
    return find_resume_point(*config_and_dag(url, *overrides), fresh=fresh, force=force)


def ended(status, steps):
    return Summary(
        run_id="run", status=status, steps=steps, workers=1, seconds=1.0, samples_per_second=None
    )


def test_an_unfinished_run_resumes_from_its_newest_checkpoint(url):
    config, dag = config_and_dag(url, "run.steps=20")
    assert begin(url).exists is False
    write_identity(config, dag, replace=False)
    assert (begin(url).done, begin(url).exists) == (0, True)
    fs, path = open_fs(url)
    fs.rm_file(f"{path}/dag.json")  # killed before it was there
    assert begin(url).exists
    write_identity(config, dag, replace=True)
    for step in (5, 10):
        commit(url, step, config, dag)
    write_summary(url, ended(Status.FAILED, 12))
    assert (begin(url, "run.steps=20").done, begin(url, "run.steps=20").resume_from.roles) == (
        10,
        ("policy",),
    )
    with pytest.raises(ConfigError, match=r"of 10 steps: raise run\.steps=8"):
        begin(url, "run.steps=8")
    commit(url, 20, config, dag)
    write_summary(url, ended(Status.COMPLETE, 20))
    with pytest.raises(ConfigError, match="finished after 20 steps"):
        begin(url, "run.steps=20")
    assert begin(url, "run.steps=21").done == 20
    assert begin(url, "run.steps=20", fresh=True).done == 0


def test_a_finished_run_without_a_checkpoint_cannot_be_gone_on_with(url):
    write_identity(*config_and_dag(url, "run.steps=2"), replace=False)
    write_summary(url, ended(Status.COMPLETE, 2))
    with pytest.raises(ConfigError, match="without a checkpoint"):
        begin(url, "run.steps=3")


def test_checkpoints_without_a_config_belong_to_nobody(url):
    commit(url, 5, *config_and_dag(url))
    with pytest.raises(ConfigError, match=r"checkpoints of a run whose config\.yaml is gone"):
        begin(url)


def test_metrics_without_a_config_belong_to_nobody(url):
    MetricsLog(url).write({"step": 1, "phase": "train", "seconds": 1.0, "metrics": {}})
    with pytest.raises(ConfigError, match=r"metrics of a run whose config\.yaml is gone.*--fresh"):
        begin(url)
    assert begin(url, fresh=True).fresh


EVERY = st.integers(0, 12)
STEPS = st.integers(0, 40)


@cache
def with_checkpoints(every):
    """Once for all examples: to load a configuration takes more than the rest of them."""
    return config_and_dag("memory://", f"checkpoint.every={every}")


@given(
    every=EVERY,
    logged=STEPS,
    summary=STEPS,
    replayed=STEPS,
    begun=st.sets(st.integers(1, 40), max_size=2),
)
def test_steps_are_done_anew_only_where_no_checkpoint_ought_to_be_there(
    every, logged, summary, replayed, begun
):
    """Whatever is left of a run without a checkpoint: it is refused, or what it loses could not
    have been saved.
    """
    url = f"memory://{uuid4().hex}/run"
    config, dag = with_checkpoints(every)
    write_identity(replace(config, run=replace(config.run, url=url)), dag, replace=False)
    log = MetricsLog(url)
    for step in range(1, logged + 1):
        log.write({"step": step, "phase": "train", "seconds": 1.0, "metrics": {}})
    write_summary(url, ended(Status.FAILED, summary))
    for step in begun:
        write_atomic(*open_fs(f"{url}/checkpoints/step={step:06d}-0001/BEGUN"), b"")
    stages = tuple(
        Stage(step=step, table="rollouts", url=url, parts=()) for step in range(1, replayed + 1)
    )
    done = max(logged, summary)
    said = ""
    try:
        check_nothing_lost(url, ResumePoint(exists=True, stages=stages), ["rollouts"])
    except CheckpointError as error:
        said = str(error)
    first_one = len(begun) == 1 and max(begun) <= every and done <= max(begun) + every
    none_was_due = not every or done < every or first_one
    assert bool(said) == (not none_was_due and replayed < max(done - 1, 1))
    assert not said or ("--fresh" in said and f"of {counted(done, 'step')}" in said)
    assert len(read_metrics(url)) == logged


OBSERVES = ["run.steps=99", "run.name=other", "run.lookahead=1", "validation.every=3", "validation.url=elsewhere",
            "observe.backends=[parquet]", "checkpoint.every=7", "cluster.workers=8", "cluster.placement={}",
            "data.transport=dask", "data.prefetch=false", "data.memory_limit=1GiB", "data.spill_directory=/tmp",
            "rollout.weight_bucket=1MiB", "rollout.weight_sync=rows",
            "rollout.process=true", "trainer.fsdp.gather_size=1MiB"]  # fmt: skip
DECIDES = [
    (
        "trainer.lr=1",
        ["trainer.lr: 0.0001 -> 1.0", "DAG: roles.policy.with.trainer.lr: 0.0001 -> 1.0"],
    ),
    ("trainer.backend=mine:SPEC", ['trainer.backend: "torch" -> "mine:SPEC"']),
    ("rollout.n=2", ["rollout.n: 8 -> 2", "DAG: nodes.rollout.with.rollout.n: 8 -> 2"]),
    ("data.batch_size=16", ["data.batch_size: 32 -> 16"]),
    ("model.path=other", ["model.path: "]),
    ("nodes.advantage.rows=anywhere", ['DAG: nodes.advantage.rows: "grouped" -> "anywhere"']),
    ("nodes.minibatches=null", ['DAG: nodes.minibatches.name: "minibatches" -> nothing']),
]


def test_what_observes_or_extends_a_run_may_change(url):
    write_identity(*config_and_dag(url), replace=False)
    assert begin(url, *OBSERVES).exists


@pytest.mark.parametrize(
    "change", ["tensor_parallel=2", "pipeline_parallel=2", "distributed_optimizer=true"]
)
def test_how_a_model_is_divided_among_workers_may_change(tmp_path, change):
    url = str(tmp_path)
    write_identity(*config_and_dag(url, "trainer.backend=megatron"), replace=False)
    assert begin(url, "trainer.backend=megatron", f"trainer.megatron.{change}").exists


def test_a_run_goes_on_with_other_servers(tmp_path):
    url = str(tmp_path)
    served = ["rollout.engine=server", "rollout.server.weights_folder=/weights"]
    write_identity(*config_and_dag(url, *served, "rollout.server.urls=[http://a:1]"), replace=False)
    more = "rollout.server.urls=[http://b:1,http://c:1]"
    assert begin(url, *served, more, "rollout.server.patience=5").exists


def test_options_of_a_backend_may_not_change(tmp_path):
    url = str(tmp_path)
    write_identity(*config_and_dag(url, "trainer.backend=mine:SPEC"), replace=False)
    with pytest.raises(ConfigError, match=r"trainer\.backend_options: \{\} -> "):
        begin(url, "trainer.backend=mine:SPEC", "trainer.backend_options={depth: 2}")


@pytest.mark.parametrize(("override", "said"), DECIDES)
def test_what_decides_its_results_may_not_and_every_difference_is_told(tmp_path, override, said):
    url = str(tmp_path)
    write_identity(*config_and_dag(url), replace=False)
    more = ["nodes.update.after=advantage"] if "minibatches" in override else []
    with pytest.raises(ConfigError) as refused:
        begin(url, override, *more)
    for part in said:
        assert part in str(refused.value)
    assert begin(url, override, *more, force=True).exists


def test_a_config_that_no_version_knows_is_named_by_its_place(url):
    write_atomic(*open_fs(f"{url}/config.yaml"), b"rollout: {unknown: 1}")
    with pytest.raises(ConfigError, match=r"run/config\.yaml: unknown key 'rollout\.unknown'"):
        begin(url)
    assert begin(url, fresh=True).fresh


def test_only_what_a_run_wrote_is_removed(url):
    config, dag = config_and_dag(url)
    write_identity(config, dag, replace=False)
    commit(url, 5, config, dag)
    MetricsLog(url)
    write_summary(url, ended(Status.FAILED, 5))
    for table in ("rollouts", "test"):
        write_part(f"{url}/{table}/step=000005", 0, 1, pa.table({"x": [1]}))
    for name in (
        "metrics.parquet",
        "tracking.json",
        "profile/step=000003/update.0.json.gz",
        "tensorboard/events.out.tfevents.1",
    ):
        write_atomic(*open_fs(f"{url}/{name}"), b"the run's")
    theirs = [
        "profile/mine.json",
        "notes.txt",
        "rollouts/notes.txt",
        "checkpoints/best.txt",
        "tensorboard/notes.txt",
        "mine/step=000001/x",
    ]
    for name in theirs:
        write_atomic(*open_fs(f"{url}/{name}"), b"mine")
    remove_run(url, tables_of([dag, None]))
    fs, path = open_fs(url)
    left = {str(file)[len(path) + 1 :] for file in fs.find(path)}
    assert left == {*theirs, "attempts/0001.json", "attempts/0001.beat"}


def test_only_steps_after_the_checkpoint_are_removed(url):
    for step in (0, 1, 2, 3):
        for table, parts in {"rollouts": 4, "validation": 2, "test": 1}.items():
            write_part(f"{url}/{table}/step={step:06d}", 0, parts, pa.table({"x": [1]}))
    fs, path = open_fs(url)
    remove_steps(url, ["rollouts", "validation", "test"], 2)
    left = sorted(str(file)[len(path) + 1 :].rpartition("/")[0] for file in fs.find(path))
    assert left == [
        f"{table}/step=00000{step}" for table in ("rollouts", "validation") for step in (0, 1, 2)
    ]
    remove_steps(url, ["rollouts", "validation", "test"], 0)
    assert fs.find(path) == []


def test_records_of_steps_that_are_done_again_are_dropped(url):
    log = MetricsLog(url)
    for step, phase in [
        (0, "validation"),
        (1, "train"),
        (2, "train"),
        (2, "validation"),
        (3, "train"),
    ]:
        log.write({"step": step, "phase": phase, "seconds": 1.0, "metrics": {"before": 1.0}})
    again = MetricsLog(url, until=2)
    again.write({"step": 3, "phase": "train", "seconds": 1.0, "metrics": {"after": 1.0}})
    found = [(record["phase"], record["step"], *record["metrics"]) for record in read_metrics(url)]
    assert found == [
        ("validation", 0, "before"),
        ("train", 1, "before"),
        ("train", 2, "before"),
        ("validation", 2, "before"),
        ("train", 3, "after"),
    ]


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_shipped_dag_can_load_weights_on_resume(path):
    file = load_config_file(path, ["data.url=x", "model.path=y"])
    brings = weights_dag(dags(file)[0])
    agents = [f"_{agent}" for agent in file.config.agents] or [""]
    assert sorted(node.name for node in brings.nodes) == sorted(
        f"{name}{agent}" for name in ("weights", "load_weights") for agent in agents
    )
    assert not any(node.lag or node.save_as for node in brings.nodes)


@columns(reads=["reward"], writes=fields(PARAMETER_DATA), new_rows=True)
def publish_by_reward(ctx, table):
    raise NotImplementedError


def test_weights_that_need_rows_cannot_be_loaded_on_resume():
    _, dag = config_and_dag("x")
    nodes = [
        replace(node, fn=publish_by_reward, options={}) if node.name == "weights" else node
        for node in dag.nodes
    ]
    with pytest.raises(
        PlanError, match=r"'weights' publishes or loads weights and needs \['reward'\]"
    ):
        weights_dag(DAG(dag.roles, tuple(nodes)))
    assert (
        weights_dag(DAG(dag.roles, tuple(node for node in dag.nodes if "weights" not in node.name)))
        is None
    )


@pytest.mark.parametrize("done", [0, 3, 4, 10])
def test_the_turns_that_are_left_are_those_of_a_run_without_a_stop(done):
    config, _ = config_and_dag("x", "run.steps=10", "validation.every=3", "checkpoint.every=4")
    every = [
        (iteration.phase, iteration.step)
        for iteration in iterations(config, ["train", "validation", "test"])
    ]
    left = list(
        iterations(config, ["train", "validation", "test", *(["weights"] if done else [])], done)
    )
    assert [
        (iteration.phase, iteration.step) for iteration in left if iteration.phase != "weights"
    ] == [(phase, step) for phase, step in every if step > done or phase == "test" or not done]
    assert all(first.sequence < second.sequence for first, second in pairwise(left))
    assert ("checkpoint", 10) in every
    assert ("weights", done) == (left[0].phase, left[0].step) or not done
    config.checkpoint.every = 0
    assert "checkpoint" not in {iteration.phase for iteration in iterations(config, ["train"])}


@pytest.mark.parametrize("best", ["reward/mean", "validation", "validation/", "test/reward/mean"])
def test_a_metric_without_its_phase_cannot_choose_the_best(best):
    with pytest.raises(
        ConfigError, match=r"checkpoint\.keep_best=.*expected train/ or validation/"
    ):
        CheckpointConfig(keep_best=best)


@pytest.mark.parametrize("flag", ["--fresh", "--force"])
@pytest.mark.parametrize(
    "start", [lambda given: main(["run", *given]), lambda given: script.main(None, None, given)]
)
def test_the_command_line_takes_the_flags_anywhere(capsys, start, flag):
    with pytest.raises(SystemExit) as ended:
        start([str(shipped("quickstart")), "run.steps=3", flag, "run.stps=3"])
    assert ended.value.code == 2
    assert "did you mean 'steps'?" in capsys.readouterr().err


ROWS = pa.table(
    {"prompt": [f"{at} + 1 =" for at in range(20)], "answer": [str(at + 1) for at in range(20)]}
)
CHANGES = {
    "fewer rows": lambda rows: rows.slice(1),
    "other values": lambda rows: rows.set_column(1, "answer", pa.array(["7"] * 20)),
    "a column more": lambda rows: rows.append_column("source", pa.array(["x"] * 20)),
    "other columns": lambda rows: rows.rename_columns(["prompt", "label"]),
}


def write_rows(kind, folder, rows=ROWS):
    if kind == "snapshot":
        create_table(str(folder), [rows])
    else:
        write_part(str(folder), 0, 1, rows, format=kind)


def versions(url):
    return {"data.url": DataVersion.of(open_table(str(url)))}


def a_run_on(data, url, step=2):
    """Return where it goes on: it has recorded what the table at ``data`` is."""
    config, dag = config_and_dag(url)
    write_identity(config, dag, replace=False, data=versions(data))
    commit(url, step, config, dag)
    return begin(url)


@pytest.mark.parametrize("kind", ["parquet", "arrow", "snapshot"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_resume_on_a_table_that_was_replaced_is_refused_by_name(kind, change, tmp_path):
    write_rows(kind, tmp_path / "data")
    url = str(tmp_path / "run")
    resume = a_run_on(tmp_path / "data", url)
    assert check_same_data(url, resume, versions(tmp_path / "data"), force=False) == ()
    write_rows(kind, tmp_path / "other", CHANGES[change](ROWS))
    other = versions(tmp_path / "other")
    with pytest.raises(
        ConfigError, match=r"the table of data\.url was replaced.*20 rows.*--force to go on"
    ):
        check_same_data(url, resume, other, force=False)
    (said,) = check_same_data(url, resume, other, force=True)
    assert "data.url" in said
    # all steps are done anew
    assert check_same_data(url, ResumePoint(exists=True), other, force=False) == ()


def test_a_resume_on_another_model_is_refused_by_name(tmp_path):
    create_table(str(tmp_path / "data"), [ROWS])
    url = str(tmp_path / "run")
    resume = a_run_on(tmp_path / "data", url)
    recorded = read_identity_file(url)
    began = ModelVersion(weights="0" * 64, files={"config.json": "2" * 64})
    replace(recorded, models={"model.path": began}).write(url)
    assert read_identity_file(url).models == {"model.path": began}
    data = versions(tmp_path / "data")
    for models in ({"model.path": began}, {}):
        assert check_same_data(url, resume, data, models, force=False) == ()
    changed = {
        "the weights of model.path were replaced": replace(began, weights="1" * 64),
        "config.json of model.path were replaced": replace(began, files={"config.json": "3" * 64}),
        "chat_template.jinja of model.path were replaced": replace(
            began, files={**began.files, "chat_template.jinja": "3" * 64}
        ),
    }
    for expected, now in changed.items():
        other = {"model.path": now}
        with pytest.raises(ConfigError, match=re.escape(expected)):
            check_same_data(url, resume, data, other, force=False)
        (said,) = check_same_data(url, resume, data, other, force=True)
        assert said.startswith(expected)


def test_a_resume_of_a_run_that_recorded_weights_alone_goes_on_and_says_so(tmp_path):
    create_table(str(tmp_path / "data"), [ROWS])
    url = str(tmp_path / "run")
    resume = a_run_on(tmp_path / "data", url)
    recorded = read_identity_file(url)
    replace(recorded, models={"model.path": ModelVersion(weights="0" * 64)}).write(url)
    now = {"model.path": ModelVersion(weights="0" * 64, files={"config.json": "2" * 64})}
    (said,) = check_same_data(url, resume, versions(tmp_path / "data"), now, force=False)
    assert said.startswith("the run has not recorded config and tokenizer of model.path")


def a_run_with_data(url, *overrides):
    """Return what starts a run on the tables that it names, which it has recorded, and its data."""
    config, dag = config_and_dag(url, "data.prepare=null", *overrides)
    data = {
        f"data.sources.{name}": DataVersion.of(open_table(source.url))
        for name, source in config.data.sources.items()
    }
    if config.data.url is not None:
        data["data.url"] = DataVersion.of(open_table(config.data.url))
    return config, dag, data


def mixture(*folders):
    named = ", ".join(f"s{at}: {{url: {folder}}}" for at, folder in enumerate(folders))
    return ("data.url=null", f"data.sources={{{named}}}")


@pytest.mark.parametrize("kind", ["parquet", "arrow", "snapshot"])
def test_a_run_goes_on_with_a_copy_of_its_data_elsewhere(kind, tmp_path):
    url = str(tmp_path / "run")
    write_rows(kind, tmp_path / "data" / "train")
    first = a_run_with_data(url, f"data.url={tmp_path / 'data' / 'train'}")
    write_identity(*first[:2], replace=False, data=first[2])
    commit(url, 2, *first[:2])
    shutil.copytree(tmp_path / "data" / "train", tmp_path / "copy")
    shutil.rmtree(tmp_path / "data")
    config, dag, data = a_run_with_data(url, f"data.url={tmp_path / 'copy'}")
    resume = find_resume_point(config, dag, fresh=False, force=False)
    assert resume.done == 2
    assert "another configuration" not in resume.note
    assert check_same_data(url, resume, data, force=False) == ()
    # what it has stored there is its own, now and after another move of the data
    digest = RunIdentity.of(*first[:2]).digest()
    assert digest in known_digests(config, dag)
    write_identity(config, dag, replace=True, data=data)
    shutil.copytree(tmp_path / "copy", tmp_path / "third")
    third = a_run_with_data(url, f"data.url={tmp_path / 'third'}")[:2]
    digests = {digest, RunIdentity.of(config, dag).digest()}
    assert digests < {*known_digests(*third)}
    # anything else that has changed is still refused, and so are other rows
    changed = config_and_dag(
        url, f"data.url={tmp_path / 'third'}", "data.prepare=null", "trainer.lr=0.5"
    )
    with pytest.raises(ConfigError, match=r"what decides its results: trainer.lr: \S+ -> 0.5"):
        find_resume_point(*changed, fresh=False, force=False)
    assert digest not in known_digests(*changed)


@pytest.mark.parametrize("kind", ["parquet", "arrow", "snapshot"])
@pytest.mark.parametrize("change", [*CHANGES, "other order", "nothing there"])
def test_a_run_refuses_other_data_elsewhere(kind, change, tmp_path):
    url = str(tmp_path / "run")
    write_rows(kind, tmp_path / "data")
    first = a_run_with_data(url, f"data.url={tmp_path / 'data'}")
    write_identity(*first[:2], replace=False, data=first[2])
    commit(url, 2, *first[:2])
    change_rows = {**CHANGES, "other order": lambda rows: rows.take([1, 0, *range(2, 20)])}
    if change in change_rows:
        write_rows(kind, tmp_path / "other", change_rows[change](ROWS))
    other = config_and_dag(url, f"data.url={tmp_path / 'other'}", "data.prepare=null")
    with pytest.raises(ConfigError, match=r"data\.url: \S+data. -> \S+other"):
        find_resume_point(*other, fresh=False, force=False)


def test_a_copy_of_plain_files_that_are_too_large_to_compare_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(identity_file, "_MOST_READ", 100)
    url = str(tmp_path / "run")
    write_rows("parquet", tmp_path / "data")
    first = a_run_with_data(url, f"data.url={tmp_path / 'data'}")
    write_identity(*first[:2], replace=False, data=first[2])
    commit(url, 2, *first[:2])
    shutil.copytree(tmp_path / "data", tmp_path / "copy")
    config, dag, data = a_run_with_data(url, f"data.url={tmp_path / 'copy'}")
    with pytest.raises(ConfigError, match=r"data\.url: \S+data. -> \S+copy"):
        find_resume_point(config, dag, fresh=False, force=False)
    # it was there all the time
    assert check_same_data(url, ResumePoint(done=2, exists=True), data, force=False) == ()


def test_a_run_goes_on_with_copies_of_some_of_its_sources(tmp_path):
    url = str(tmp_path / "run")
    for at in range(3):
        write_rows("parquet", tmp_path / f"{at}", ROWS.slice(at))
    first = a_run_with_data(url, *mixture(*(tmp_path / f"{at}" for at in range(2))))
    write_identity(*first[:2], replace=False, data=first[2])
    commit(url, 2, *first[:2])
    shutil.copytree(tmp_path / "1", tmp_path / "copy")
    config, dag, _ = a_run_with_data(url, *mixture(tmp_path / "0", tmp_path / "copy"))
    assert find_resume_point(config, dag, fresh=False, force=False).done == 2
    for folders in (("0", "2"), ("copy", "0")):
        config, dag, _ = a_run_with_data(url, *mixture(*(tmp_path / name for name in folders)))
        with pytest.raises(ConfigError, match=r"data\.sources"):
            find_resume_point(config, dag, fresh=False, force=False)


def with_validation(folder, **more):
    """Return a configuration that trains, validates and tests on tables in ``folder``, and the
    data of a run of it.
    """
    names = {"data.url": "train", "validation.url": "validation", "validation.test_url": "test"}
    given = {key: f"{folder}/{name}" for key, name in names.items()} | more
    settings = [f"model.path={folder}/model", "data.prepare=null", f"run.url={folder}/run"]
    file = load_config_file(
        shipped("quickstart"), [*settings, *(f"{key}={url}" for key, url in given.items())]
    )
    return (
        file.config,
        dags(file)[0],
        data_versions(plan_phases(file.config, *dags(file), worker_names(file.config))),
    )


@pytest.mark.parametrize(
    ("replaced", "key"), [("validation", "validation.url"), ("test", "validation.test_url")]
)
def test_a_resume_whose_table_to_validate_on_was_replaced_is_refused_by_name(
    replaced, key, tmp_path
):
    for name in ("train", "validation", "test"):
        write_part(str(tmp_path / name), 0, 1, ROWS)
    config, dag, data = with_validation(tmp_path)
    write_identity(config, dag, replace=False, data=data)
    commit(config.run.url, 2, config, dag)
    resume = find_resume_point(config, dag, fresh=False, force=False)
    assert check_same_data(config.run.url, resume, data, force=False) == ()
    write_part(str(tmp_path / replaced), 0, 1, ROWS.slice(5))
    _, _, now = with_validation(tmp_path)
    with pytest.raises(
        ConfigError, match=rf"table of {key}=\S+/{replaced} was replaced.*20 rows.*15 rows.*--force"
    ):
        check_same_data(config.run.url, resume, now, force=False)
    (said,) = check_same_data(config.run.url, resume, now, force=True)
    assert key in said


def test_a_resume_may_validate_on_a_table_at_another_url_or_on_none(tmp_path):
    for name in ("train", "validation", "test"):
        write_part(str(tmp_path / name), 0, 1, ROWS)
    config, dag, data = with_validation(tmp_path)
    write_identity(config, dag, replace=False, data=data)
    commit(config.run.url, 2, config, dag)
    resume = find_resume_point(config, dag, fresh=False, force=False)
    write_part(str(tmp_path / "other"), 0, 1, ROWS.slice(5))
    for more in (
        {"validation.url": f"{tmp_path}/other"},
        {"validation.url": "null", "validation.test_url": "null"},
    ):
        _, _, now = with_validation(tmp_path, **more)
        assert check_same_data(config.run.url, resume, now, force=False) == ()


def test_a_table_that_was_copied_is_the_same_and_one_that_grew_is_not(tmp_path):
    create_table(str(tmp_path / "data"), [ROWS])
    write_part(str(tmp_path / "plain"), 0, 1, ROWS)
    for name in ("data", "plain"):
        copy = tmp_path / "elsewhere" / name
        copy.parent.mkdir(exist_ok=True)
        fs, path = open_fs(str(tmp_path / name))
        fs.cp(path, str(copy), recursive=True)
        assert versions(copy) == versions(tmp_path / name)
    before = versions(tmp_path / "data")
    append(str(tmp_path / "data"), [ROWS])
    assert versions(tmp_path / "data")["data.url"] != before["data.url"]
    assert str(versions(tmp_path / "data")["data.url"]).startswith("version 2, 40 rows")


def test_a_run_of_an_earlier_version_resumes_on_any_data(tmp_path):
    url = str(tmp_path / "run")
    write_part(str(tmp_path / "data"), 0, 1, ROWS)
    resume = a_run_on(tmp_path / "data", url)
    (tmp_path / "run" / "identity.json").unlink()
    write_part(str(tmp_path / "data"), 0, 1, ROWS.slice(3))
    assert check_same_data(url, resume, versions(tmp_path / "data"), force=False) == ()


@pytest.mark.parametrize("name", ["identity.json", "retention.json"])
@given(
    text=st.binary(max_size=60)
    | st.sampled_from([b"{}", b"[]", b'{"version": 1, "files": 1, "data": 2}'])
)
def test_whatever_stands_in_the_small_files_is_read_or_refused(name, text):
    url = f"memory://{uuid4().hex}/run"
    fs, path = open_fs(url)
    fs.pipe_file(f"{path}/{name}", text)
    with pytest.raises(ConfigError, match="is not what a run writes there"):
        read_identity_file(url) if name == "identity.json" else read_retention(url)


def test_steps_that_were_removed_on_purpose_are_remembered_and_never_forgotten():
    url = f"memory://{uuid4().hex}/run"
    assert read_retention(url) == {}
    note_retention(url, {"rollouts": 5, "validation": 2})
    note_retention(url, {"rollouts": 3})
    assert read_retention(url) == {"rollouts": 5, "validation": 2}


def test_small_files_of_a_later_version_are_refused(tmp_path):
    url = str(tmp_path / "run")
    write_part(str(tmp_path / "data"), 0, 1, ROWS)
    a_run_on(tmp_path / "data", url)
    note_retention(url, {"rollouts": 5})
    for name, read in (("identity.json", read_identity_file), ("retention.json", read_retention)):
        file = tmp_path / "run" / name
        assert read(url)
        later = file.read_text().replace('"version": 1', '"version": 2', 1)
        file.write_text(later)
        with pytest.raises(ConfigError, match="expected an object of version 1"):
            read(url)


def moved_run(folder, *overrides):
    """Begin a run in ``folder/runs/mine`` with data and model beside it; return the arguments with
    which a start there goes on.
    """
    for name in ("data", "model"):
        (folder / "runs" / name).mkdir(parents=True, exist_ok=True)
    return [
        f"model.path={folder}/runs/model",
        "data.prepare=null",
        "validation.url=null",
        "validation.test_url=null",
        *overrides,
    ]


@pytest.mark.parametrize("data", ["runs/mine/data", "runs/data"])
@pytest.mark.parametrize("keep", [False, True], ids=["moved", "copied"])
def test_a_run_that_was_moved_with_its_data_goes_on_and_can_be_asked(data, keep, tmp_path):
    def begun(folder):
        more = moved_run(folder, f"data.url={folder}/{data}")
        return config_and_dag(f"{folder}/runs/mine", *more)

    old = tmp_path / "home" / "old"
    new = tmp_path / "disk" / "new"
    config, dag = begun(old)
    write_part(config.data.url, 0, 1, ROWS)
    tables = data_versions(plan_phases(config, dag, None, worker_names(config)))
    write_identity(config, dag, replace=False, data=tables)
    commit(config.run.url, 2, config, dag)
    shutil.copytree(old, new)
    if not keep:
        shutil.rmtree(old)
    config, dag = begun(new)
    resume = find_resume_point(config, dag, fresh=False, force=False)
    assert resume.done == 2
    assert "another configuration" not in resume.note
    assert check_same_data(config.run.url, resume, tables, force=False) == ()
    found = Run(config.run.url)
    trainer = found.dag["roles"]["policy"]["with"]
    if not keep:
        assert found.config.model.path == f"{new}/runs/model"
        assert trainer["model"]["path"] == f"{new}/runs/model"
        assert found.config.data.url == f"{new}/{data}"
    elif data == "runs/data":
        assert found.config.data.url == f"{old}/{data}", "what is still there is not exchanged"


def test_rows_and_checkpoints_of_a_run_stay_its_own_where_it_was_moved(tmp_path):
    """Its identity names places: what it wrote where it was had another one, and was done again."""

    def begun(name, *more):
        url = f"{tmp_path}/{name}"
        return config_and_dag(url, f"data.url={url}/data", *more)

    config, dag = begun("first")
    write_part(config.data.url, 0, 1, ROWS)
    write_identity(config, dag, replace=False)
    commit(config.run.url, 2, config, dag)
    digests = known_digests(config, dag)
    for before, now in (("first", "second"), ("second", "third")):
        (tmp_path / before).rename(tmp_path / now)
        config, dag = begun(now)
        for _ in range(2):  # as the first start there, and as a later one
            assert known_digests(config, dag)[1:] == digests
            resume = find_resume_point(config, dag, fresh=False, force=False)
            assert "another configuration" not in resume.note
            write_identity(config, dag, replace=True)
        digests = known_digests(config, dag)
    assert len(digests) == 3
    other, dag = begun("third", "run.seed=7")
    assert known_digests(other, dag) == [RunIdentity.of(other, dag).digest()]
    write_identity(other, dag, replace=True)
    config, dag = begun("third")
    write_identity(config, dag, replace=True)
    assert len(known_digests(config, dag)) == 1, "another run was in between"


@pytest.mark.parametrize("writes", range(4))
def test_a_moved_run_whose_start_was_killed_between_two_files_is_still_that_run(
    tmp_path, monkeypatch, writes
):
    """After none, one, two or three of the files that a start writes, it finds its data and goes
    on.
    """

    def begun(name):
        url = f"{tmp_path}/{name}"
        return config_and_dag(url, f"data.url={url}/data")

    config, dag = begun("before")
    write_part(config.data.url, 0, 1, ROWS)
    write_identity(config, dag, replace=False)
    commit(config.run.url, 2, config, dag)
    digests = known_digests(config, dag)
    (tmp_path / "before").rename(tmp_path / "after")
    config, dag = begun("after")
    written = []

    def write_or_be_killed(fs, path, data):
        if len(written) == writes:
            raise KeyboardInterrupt
        write_atomic(fs, path, data)
        written.append(path)

    with monkeypatch.context() as patched:
        for module in (run_folder, identity_file):
            patched.setattr(module, "write_atomic", write_or_be_killed)
        with pytest.raises(KeyboardInterrupt):
            write_identity(config, dag, replace=True)
    for _ in range(2):
        assert find_resume_point(config, dag, fresh=False, force=False).done == 2
        assert Run(config.run.url).config.data.url == f"{tmp_path}/after/data"
        assert set(digests) <= set(known_digests(config, dag))
        write_identity(config, dag, replace=True)
    assert read_identity_file(config.run.url).url == f"{tmp_path}/after"


def test_a_run_that_was_moved_to_a_store_with_a_password_has_not_changed():
    moved = Relocation(before="/runs/mine", now="ftp://me:secret@host/mine")
    assert moved.is_same("/runs/mine/data", redacted("ftp://me:secret@host/mine/data"))
    assert not moved.is_same("/runs/mine/data", redacted("ftp://me:secret@host/other/data"))


def test_a_run_that_was_renamed_finds_the_data_in_its_folder(tmp_path):
    def begun(name):
        return config_and_dag(f"{tmp_path}/{name}", f"data.url={tmp_path}/{name}/data")

    config, dag = begun("before")
    write_part(config.data.url, 0, 1, ROWS)
    write_identity(config, dag, replace=False)
    commit(config.run.url, 2, config, dag)
    (tmp_path / "before").rename(tmp_path / "after")
    config, dag = begun("after")
    assert find_resume_point(config, dag, fresh=False, force=False).done == 2
    assert Run(config.run.url).config.data.url == f"{tmp_path}/after/data"
    (tmp_path / "after" / "identity.json").rename(tmp_path / "identity.json")
    (tmp_path / "after" / "identity.json").write_text("{")
    assert Run(config.run.url).config.run.steps, "a damaged record keeps nobody from the rest"
    (tmp_path / "identity.json").rename(tmp_path / "after" / "identity.json")
    config, dag = config_and_dag(f"{tmp_path}/after", f"data.url={tmp_path}/other")
    with pytest.raises(
        ConfigError, match=rf"was at '{tmp_path}/before'\).* data\.url: .*before/data.* -> .*/other"
    ):
        find_resume_point(config, dag, fresh=False, force=False)


def test_a_run_that_was_downloaded_from_a_store_finds_the_data_in_its_folder(tmp_path):
    before = f"memory://{uuid4().hex}/runs/mine"
    config, dag = config_and_dag(before, f"data.url={before}/data")
    write_identity(config, dag, replace=False)
    fs, path = open_fs(before)
    fs.get(path, str(tmp_path / "mine"), recursive=True)
    assert Run(str(tmp_path / "mine")).config.data.url == f"{tmp_path}/mine/data"


def failed_before_its_first_step(url, *overrides):
    """Leave what a run leaves whose first step fails: rows that nobody committed, a checkpoint that
    was begun, a validation before the first step.
    """
    config, dag = config_and_dag(url, *overrides)
    write_identity(config, dag, replace=False)
    fs, path = open_fs(url)
    write_part(f"{url}/stages/rollout/step=000001", 0, 1, pa.table({"x": [1]}))
    write_atomic(fs, f"{path}/validation/step=000000/_parts-0001.json", b"{}")
    write_atomic(fs, f"{path}/trace/step=000001/_parts-0001.json", b"{}")
    write_atomic(fs, f"{path}/checkpoints/step=000002-0001/BEGUN", b"")
    write_summary(url, ended(Status.FAILED, 0))


CHANGED = "rewards.function=siirl_dask.rewards:gsm8k"


def test_a_run_that_failed_before_its_first_step_takes_a_corrected_key_and_says_so(url):
    failed_before_its_first_step(url)
    assert (begin(url).exists, begin(url).fresh) == (True, False)
    resume = begin(url, CHANGED)
    assert resume.fresh
    assert "begins again" in resume.note
    assert "rewards.function" in resume.note
    config, dag = config_and_dag(url, CHANGED)
    remove_run(url, tables_of([dag]))
    write_identity(config, dag, replace=False)
    assert begin(url, CHANGED).exists


def commits_rows(url):
    fs, path = open_fs(url)
    write_atomic(fs, f"{path}/stages/rollout/step=000001/_parts-0001.json", b"{}")


def commits_samples(url):
    fs, path = open_fs(url)
    write_atomic(fs, f"{path}/rollouts/step=000001/_parts-0001.json", b"{}")


def writes_a_checkpoint(url):
    fs, path = open_fs(url)
    write_atomic(fs, f"{path}/checkpoints/step=000002-0001/policy/.metadata", b"x")


def logs_a_step(url):
    write_atomic(*open_fs(f"{url}/metrics.jsonl"), b'{"step": 1, "phase": "train", "attempt": 1}\n')


def loses_its_metrics(url):
    write_atomic(*open_fs(f"{url}/metrics.jsonl"), b"\x00\x00\n")


def is_not_known_to_have_ended(url):
    fs, path = open_fs(url)
    fs.rm_file(f"{path}/summary.json")


def has_a_summary_of_a_step(url):
    write_summary(url, ended(Status.INTERRUPTED, 1))


def has_a_damaged_summary(url):
    write_atomic(*open_fs(f"{url}/summary.json"), b"{")


@pytest.mark.parametrize(
    "happened",
    [
        commits_rows,
        commits_samples,
        writes_a_checkpoint,
        logs_a_step,
        loses_its_metrics,
        is_not_known_to_have_ended,
        has_a_summary_of_a_step,
        has_a_damaged_summary,
    ],
)
def test_a_run_that_has_done_anything_is_not_begun_again_by_another_key(url, happened):
    failed_before_its_first_step(url)
    happened(url)
    with pytest.raises(ConfigError, match=r"differs in what decides.*rewards\.function"):
        begin(url, CHANGED)
    assert begin(url, CHANGED, force=True).exists
