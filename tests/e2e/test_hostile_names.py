"""Whole commands on runs whose names are patterns of each other: each finds its own run, and
leaves the other alone.
"""

import io
import json
import os
from contextlib import redirect_stdout
from pathlib import Path
from uuid import uuid4

import pyarrow.parquet as pq
import pytest
from distributed import Client
from hypothesis import HealthCheck, Phase, given, settings
from siirl_storage import join, open_fs
from siirl_storage.files import at, list_files

from siirl_dask.cli import main
from tests.e2e.test_object_store import set_environment
from tests.names import NEIGHBOURS

SMALL = ("cluster.workers=1", "cluster.placement={}", "checkpoint.every=1", "run.steps=2")
MEANS = (
    "SELECT step, count(*) AS rows, avg(reward) AS reward, min(response) AS first FROM rollouts "
    "GROUP BY 1 ORDER BY 1"
)
QUESTIONS = ([MEANS], ["--worst", "2"], ["--mismatch"], ["--zero-variance"])
EXAMPLES = {"local": 3, "memory": 2, "s3": 1}


def contents(url):
    """Return the bytes of all files of a run, by their names in it."""
    fs, root = open_fs(url)
    return {name: fs.cat_file(at(root, name)) for name in list_files(fs, root)}


def write(url, files):
    fs, root = open_fs(url)
    for name, data in files.items():
        path = at(root, name)
        fs.makedirs(path.rpartition("/")[0], exist_ok=True)
        fs.pipe_file(path, data)


def said(*arguments):
    """Return what a command prints; it must end well."""
    code = None
    with redirect_stdout(io.StringIO()) as out:
        try:
            main([str(argument) for argument in arguments])
        except SystemExit as end:  # of ``check`` and ``watch``, which have codes of their own
            code = end.code
    assert not code, arguments
    return out.getvalue()


def read(url, out):
    """Run every command that reads a run. Return what depends on its rows and weights alone."""
    answers = [said("rollouts", url, *question).replace(url, "RUN") for question in QUESTIONS]
    Path(out).mkdir(parents=True, exist_ok=True)
    said("report", url, "-o", f"{out}/report.html")
    said("trace", url, "-o", f"{out}/trace.json")
    said("watch", url, "--once")
    said("check", url)
    said("clean", url, "--dry-run")
    said("plan", "--analyze", url)
    said("export", url, f"{out}/model")
    return answers, contents(f"{out}/model")["model.safetensors"]


@pytest.mark.slow
def test_commands_read_their_own_run_whatever_it_and_its_neighbour_are_called(
    train, tmp_path, s3, monkeypatch
):
    monkeypatch.setenv("COLUMNS", "300")  # or a name's length would move the ends of lines
    runs = [contents(str(train(f"plain{seed}", *SMALL, f"run.seed={seed}").url)) for seed in (1, 2)]
    expected = [read(str(tmp_path / f"plain{seed}"), tmp_path / f"out{seed}") for seed in (1, 2)]
    assert expected[0] != expected[1]

    def check(names, root):
        urls = [join(root, name, "sweep") for name in names]
        for url, files in zip(urls, runs, strict=True):
            write(url, files)
        for url, own, other in ((urls[0], 0, 1), (urls[1], 1, 0)):
            before = contents(urls[other])
            assert read(url, tmp_path / uuid4().hex) == expected[own], url
            said("clean", url, "--keep-stages", "1")
            assert contents(urls[other]) == before, url

    for store, root in {"local": str(tmp_path), "memory": "memory://hostile", "s3": s3}.items():

        @settings(
            max_examples=EXAMPLES[store],
            phases=[Phase.generate],  # to shrink what takes seconds would take an hour
            derandomize=True,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow],
        )
        @given(NEIGHBOURS)
        def holds(names):
            check(names, f"{root}/{uuid4().hex}")  # noqa: B023 (it is called at once)

        holds()


@pytest.mark.slow
@pytest.mark.parametrize("store", ["local", pytest.param("s3", marks=pytest.mark.sweep)])
def test_a_run_that_goes_on_begins_anew_or_is_evaluated_leaves_its_neighbour_alone(
    store, train, request, digits_task, cluster_address, tmp_path
):
    root = (
        str(tmp_path / "runs")
        if store == "local"
        else f"{request.getfixturevalue('s3')}/{uuid4().hex}"
    )
    url, other = (f"{root}/{name}" for name in ("reward=7/e[x]*p? #é", "reward=7/exp1 #é"))
    with Client(
        cluster_address
    ) as client:  # its processes may be older than the store, whose address they need
        client.run(
            set_environment,
            {name: value for name, value in os.environ.items() if name.startswith("AWS_")},
        )
    for place, seed in ((url, 1), (other, 2)):
        train("", *SMALL, f"run.url={place}", f"run.seed={seed}")
    before = contents(other)
    train("", *SMALL, f"run.url={url}", "run.seed=1", "run.steps=3")
    assert steps(url) == [1, 2, 3]
    pq.write_table(pq.read_table(digits_task.train).slice(0, 4), tmp_path / "few.parquet")
    where = ("--workers", "1", f"cluster.address={cluster_address}")
    said("eval", url, "--data", tmp_path / "few.parquet", "--n", "1", *where)
    train("", *SMALL, f"run.url={url}", "run.seed=3", "run.steps=1", fresh=True)
    assert steps(url) == [1]
    assert contents(other) == before


def steps(url):
    """Return the steps of which a run has metrics."""
    records = map(json.loads, contents(url)["metrics.jsonl"].decode().splitlines())
    return [record["step"] for record in records if record["phase"] == "train"]
