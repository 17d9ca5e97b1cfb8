"""Estimates beside measurements: what deviates is marked, what is unknown stays so, splits begin
from what was seen.
"""

import json
from contextlib import suppress

import pytest
import yaml

from siirl_dask.cli import main
from siirl_dask.config.file import load_config_file, shipped
from siirl_dask.driver.phases import dags, plan_phases, worker_names
from siirl_dask.estimates.analysis import Compared, analyze, mean_lengths
from siirl_dask.estimates.computing_seconds import StepTokens
from siirl_dask.estimates.memory import WorkerMemory, sizes_of
from siirl_dask.estimates.speeds import TABLE
from siirl_dask.observe.trace.step_averages import Measured, MeasuredEdge, MeasuredNode
from siirl_dask.planner import Phase, estimate
from tests.models.configs import QWEN2_5_7B, write_config
from tests.written_runs import begin_run, train_record, whole_run, write_metrics, write_trace

APART = "cluster.placement={rollout: [0, 1], reward: [0, 1], policy: [2, 3]}"
RECORDS = [train_record(step) for step in (2, 3)]


@pytest.fixture(scope="module")
def planned(tmp_path_factory):
    folder = write_config(tmp_path_factory.mktemp("7b") / "model", QWEN2_5_7B)
    given = [
        f"model.path={folder}",
        "cluster.workers=4",
        "data.url=none",
        "data.batch_size=32",
        "rollout.n=8",
        APART,
    ]
    given += ["rollout.engine=vllm", "rollout.max_response_length=2048", "trainer.backend=fsdp"]
    file = load_config_file(shipped("dags/grpo.yaml"), given)
    plan, source = plan_phases(
        file.config, *dags(file), worker_names(file.config), assume_columns=True
    )[Phase.TRAIN]
    return file.config, plan, sizes_of(file.config, plan, source)


def measured(rollout=10.0, update=4.0, step=20.0, memory=None, **edges):
    nodes = {
        "rollout": rollout,
        "old_logprobs": 2.0,
        "update": update,
        "weights": 0.5,
        "load_weights": 0.25,
    }
    return Measured(
        steps=[2, 3],
        seconds=step,
        workers=["0", "1", "2", "3"],
        nodes={name: MeasuredNode(took, "1", took, memory) for name, took in nodes.items()},
        edges={
            name.replace("_to_", "->"): MeasuredEdge(nbytes, 0.1, 0.2)
            for name, nbytes in edges.items()
        },
        memory={} if memory is None else dict.fromkeys("0123", memory),
    )


def analyzed(planned, found, *, speed=None, lengths=None, records=RECORDS, memory=()):
    return analyze(*planned, memory, found, records, speed, lengths or mean_lengths(records, 2048))


def test_what_was_not_measured_or_cannot_be_known_is_none(planned):
    found = analyzed(planned, measured())
    nodes = {node.name: node for node in found.nodes}
    assert (nodes["reward"].seconds.measured, nodes["reward"].share, nodes["reward"].memory) == (
        None,
        None,
        None,
    )
    assert nodes["rollout"].seconds.estimated is None, "no device was named"
    edges = {(edge.source, edge.target): edge for edge in found.edges}
    moved = edges["rollout", "old_logprobs"]
    assert moved.bytes.estimated > 0
    assert (moved.bytes.measured, moved.bytes.ratio, moved.bytes.deviates) == (None, None, False)
    assert edges["update", "weights"].most_bytes is None, "rows stay"


def test_bytes_are_estimated_at_the_lengths_that_were_seen(planned):
    _, plan, sizes = planned
    found = analyzed(planned, measured(rollout_to_old_logprobs=1e3))
    (edge,) = [
        edge for edge in found.edges if (edge.source, edge.target) == ("rollout", "old_logprobs")
    ]
    assert found.lengths == StepTokens(17.0, 11.0, 2048.0), (
        "7,168 tokens of 256 rows, 11 of each a response's"
    )
    assert edge.most_bytes == estimate(plan, sizes)["rollout", "old_logprobs"].bytes
    assert edge.bytes.estimated < edge.most_bytes / 20
    assert edge.bytes.measured == 1e3
    assert not edge.bytes.deviates, "rows that stay on their worker bring no bytes"
    more = analyzed(planned, measured(rollout_to_old_logprobs=1e6)).edges
    assert [edge.target for edge in more if edge.bytes.deviates] == ["old_logprobs"]


def test_rows_that_are_lost_on_their_way_are_marked(planned):
    fewer = [train_record(step, samples=240.0) for step in (2, 3)]
    rows = {edge.target: edge.rows for edge in analyzed(planned, measured(), records=fewer).edges}
    assert (rows["old_logprobs"].estimated, rows["old_logprobs"].measured) == (256, 240)
    assert rows["old_logprobs"].deviates
    assert not rows["rollout"].deviates
    assert rows["rollout"].measured == 32, "prompts"


@pytest.mark.parametrize("speed", [None, TABLE["h100"]])
def test_the_split_that_ran_takes_as_long_as_it_did(planned, speed):
    found = analyzed(planned, measured(), speed=speed)
    (own,) = [split for split in found.splits if split.rollout == 2]
    assert own.seconds == pytest.approx(20.0)
    assert (found.seconds.estimated is None) == (speed is None)


def test_workers_are_better_where_the_time_goes(planned):
    slow_engine = analyzed(planned, measured(rollout=100.0, step=110.0)).splits
    slow_trainer = analyzed(planned, measured(update=100.0, step=115.0)).splits
    apart = [
        [split.rollout for split in splits if not split.together]
        for splits in (slow_engine, slow_trainer)
    ]
    assert (apart[0][0], apart[1][0]) == (3, 1)


def test_memory_deviates_above_its_bound_alone(planned):
    groups = [
        WorkerMemory(workers, {"policy": 0}, 0, "update", 0, (), process=nbytes)
        for workers, nbytes in ((("0", "1"), 10**9), (("2", "3"), 9 * 10**9))
    ]
    above, below = analyzed(planned, measured(memory=3 * 10**9), memory=groups).memory
    assert (above.bytes.ratio, above.bytes.deviates, below.bytes.deviates) == (3.0, True, False)
    unknown, _ = analyzed(planned, measured(), memory=groups).memory
    assert (unknown.bytes.measured, unknown.bytes.deviates) == (None, False)


@pytest.mark.parametrize(
    ("estimated", "seen", "deviates"),
    [
        (2.0, 2.9, False),
        (2.0, 3.1, True),
        (3.1, 2.0, True),
        (0.0, 5.0, True),
        (5.0, 0.0, True),
        (None, 5.0, False),
    ],
)
def test_half_as_much_again_deviates(estimated, seen, deviates):
    assert Compared(estimated, seen).deviates == deviates


def test_the_command_shows_a_run_s_plan_beside_what_it_measured(tmp_path, capsys):
    url = whole_run(tmp_path / "run", memory=700_000_000)
    main(["plan", "--analyze", url])
    said = " ".join(capsys.readouterr().out.split())
    for told in (
        "note: measured in 3 steps, 8 to 10",
        "rollout -> old_logprobs 256 55.3 kB 39.0 kB 30.0 kB 0.77",
        "rollout rollout on 2 - 1.5 s - 42% 1 700.0 MB",
        "update policy on 2 - 1.4 s - 39%",
        "reward reward on 2",
        "2, 3 policy",
        "1.4 GB",
        "all 4 do both",
        "less",
    ):
        assert told in said, told
    main(["plan", "--analyze", url, "--format", "json"])
    data = json.loads(capsys.readouterr().out)
    assert data["seconds"] == {
        "estimated": None,
        "measured": pytest.approx(3.6),
        "times": 1.5,
        "above_only": False,
    }
    assert {node["name"]: node["memory"] for node in data["nodes"]}["update"] == 1_400_000_000


def test_a_run_that_went_on_with_fewer_workers_is_planned_on_as_many(tmp_path, capsys):
    url = begin_run(tmp_path / "run", "cluster.placement={}", "cluster.workers=6")
    write_metrics(url, [train_record(2)])
    write_trace(url, 2)
    main(["plan", "--analyze", url])
    said = capsys.readouterr().out
    assert "the trace has 4 workers, and cluster.workers=6: the plan is for 4" in said
    assert "rollout on 4" in said


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["plan"], "plan needs CONFIG, a YAML file, or --analyze RUN"),
        (
            ["plan", "--analyze", "{run}", "x.yaml"],
            "reads that run's own configuration: leave out x.yaml",
        ),
        (
            ["plan", "--analyze", "{run}", "--workers", "4"],
            "reads that run's own configuration: leave out --workers",
        ),
        (["plan", "--analyze", "{run}/none"], "run/none' holds no run"),
        (["plan", "--analyze", "{run}"], "holds no trace"),
        (["plan", "--analyze", "{run}", "--format", "svg"], "siirl-dask report draws a run's DAG"),
        (["plan", "--analyze", "{run}", "--on", "h10"], "holds no trace"),
    ],
)
def test_what_cannot_be_analyzed_is_refused(tmp_path, capsys, arguments, said):
    begin_run(tmp_path / "run")
    with pytest.raises(SystemExit) as ended:
        main([text.format(run=tmp_path / "run") for text in arguments])
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    "place",
    [
        lambda dag, name: dag["nodes"][0].update(run=name),
        lambda dag, name: next(iter(dag["roles"].values())).update(build=name),
        lambda dag, name: dag["nodes"][-1]["with"].update(anything=name),
        lambda dag, name: dag["nodes"][-1]["with"].update(anything=[{"run": name, "with": {}}]),
    ],
)
@pytest.mark.parametrize("form", ["{file}:f", "siirl_dask./../{file}:f", "evil:f", "evil:f "])
def test_code_that_a_run_s_folder_names_is_not_imported(tmp_path, monkeypatch, capsys, place, form):
    """A run's folder may come from anyone; a file that it names may lie in it."""
    url = whole_run(tmp_path / "run")
    ran = tmp_path / "ran"
    (tmp_path / "evil.py").write_text(f"open({str(ran)!r}, 'w')\ndef f(*given, **named): pass\n")
    (tmp_path / "siirl_dask.").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    spec = json.loads((tmp_path / "run" / "dag.json").read_text())
    place(spec, form.format(file="evil.py"))
    (tmp_path / "run" / "dag.json").write_text(json.dumps(spec))
    with pytest.raises(SystemExit):
        main(["plan", "--analyze", url])
    assert not ran.exists()
    assert "names code that is not of siirl_dask: " in capsys.readouterr().err


@pytest.mark.parametrize("key", ["trainer", "critic"])
@pytest.mark.parametrize("name", ["evil:SPEC", "evil.py:SPEC", "evil:SP-EC", "evil:SPEC "])
def test_a_backend_that_a_run_s_configuration_names_is_not_imported(
    tmp_path, monkeypatch, capsys, key, name
):
    url = whole_run(tmp_path / "run")
    ran = tmp_path / "ran"
    (tmp_path / "evil.py").write_text(f"open({str(ran)!r}, 'w')\nSPEC = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "run" / "config.yaml"
    text = file.read_text()
    group = text.index(f"\n{key}:")
    file.write_text(text[:group] + text[group:].replace("backend: torch", f"backend: '{name}'", 1))
    assert name in file.read_text()
    spec = json.loads((tmp_path / "run" / "dag.json").read_text())
    del spec["roles"]["policy"]["with"]["trainer"]
    (tmp_path / "run" / "dag.json").write_text(json.dumps(spec))
    with pytest.raises(SystemExit):
        main(["plan", "--analyze", url])
    assert not ran.exists()


@pytest.mark.parametrize("form", ["{file}:SPEC", "evil:SPEC", "siirl_dask./../{file}:SPEC"])
def test_an_engine_that_a_run_s_configuration_names_is_not_imported(
    tmp_path, monkeypatch, capsys, form
):
    url = whole_run(tmp_path / "run")
    ran = tmp_path / "ran"
    (tmp_path / "evil.py").write_text(f"open({str(ran)!r}, 'w')\n")
    (tmp_path / "siirl_dask.").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "run" / "config.yaml"
    config = yaml.safe_load(file.read_text())
    config["rollout"]["engine"] = form.format(file="evil.py")
    file.write_text(yaml.safe_dump(config))
    for command in (
        ["plan", "--analyze", url],
        ["report", url, "--output", "report.html"],
        ["check", url],
    ):
        with suppress(SystemExit):
            main(command)
        assert not ran.exists(), command
    assert "names code that is not of siirl_dask: " in capsys.readouterr().err


def test_code_of_one_s_own_is_imported_where_that_is_said(tmp_path, monkeypatch, capsys):
    url = whole_run(tmp_path / "run")
    ran = tmp_path / "ran"
    (tmp_path / "mine.py").write_text(f"open({str(ran)!r}, 'w')\ndef build(device, rank): pass\n")
    monkeypatch.chdir(tmp_path)
    spec = json.loads((tmp_path / "run" / "dag.json").read_text())
    next(iter(spec["roles"].values()))["build"] = "mine.py:build"
    (tmp_path / "run" / "dag.json").write_text(json.dumps(spec))
    with pytest.raises(SystemExit):  # such a role cannot be planned
        main(["plan", "--analyze", url, "--trust"])
    assert ran.exists()
    capsys.readouterr()
    with pytest.raises(SystemExit):
        main(["plan", "--trust", "x.yaml"])
    assert "--trust is for --analyze RUN" in capsys.readouterr().err
