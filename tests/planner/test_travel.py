"""Functions of the user's own files reach workers that run elsewhere and cannot import them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import threading
from functools import partial

import cloudpickle
import pytest

from siirl_dask.config.file import shipped
from siirl_dask.errors import PlanError, RunError
from siirl_dask.planner import DAG, Node, Role, compile_chains, dag_from_spec
from siirl_dask.schema import make_schema
from siirl_dask.worker.run_spec import serialize_phases
from tests.conftest import Finished, digits_overrides

FILES = {
    "rewards/mine.py": """
        import helpers
        from helpers import Weighing

        WEIGHING = Weighing(share=0.25)

        def digits(prompt, response, answer, **extra):
            return WEIGHING.of(helpers.count(response))
    """,
    "helpers.py": """
        from dataclasses import dataclass

        @dataclass
        class Weighing:
            share: float
            def of(self, count): return self.share * count

        def count(response): return sum(c.isdigit() for c in response)
    """,
    "nodes.py": """
        import pyarrow as pa
        from siirl_dask.planner import columns
        from helpers import count

        @columns(reads=["response"], writes={"digits": pa.int32()})
        def count_digits(ctx, table):
            return table.append_column("digits", pa.array(map(count, table["response"].to_pylist()), pa.int32()))
    """,
    "script.py": """
        from siirl_dask import Node, grpo, main
        import helpers, nodes

        def near(prompt, response, answer, **extra): return helpers.count(response) / 4

        def training(config):
            dag = grpo(config, reward=near)
            dag = dag.add(Node("digits", nodes.count_digits, role="reward", after="reward"))
            return dag.replace("advantage", after=("digits", "old_logprobs"))

        if __name__ == "__main__":
            main(training)
    """,
}
COUNTED = [
    "nodes.digits={run: nodes.py:count_digits, role: reward, after: reward}",
    "nodes.advantage.after=[digits, old_logprobs]",
    "run.steps=1",
]


@pytest.fixture
def project(tmp_path):
    """A folder of the user's own files, on nobody's Python path."""
    folder = tmp_path / "project"
    for name, text in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(textwrap.dedent(text))
    return folder


def rewarded(rows, share):
    for response, reward in zip(
        rows["response"].to_pylist(), rows["reward"].to_pylist(), strict=True
    ):
        assert reward == pytest.approx(share * sum(c.isdigit() for c in response))


def test_functions_in_files_run_on_workers_in_another_folder(train, project, monkeypatch):
    monkeypatch.chdir(project)  # the workers have been started elsewhere
    monkeypatch.syspath_prepend(project)  # as the command does with the working directory
    before = set(sys.modules)
    try:
        run = train("files", *COUNTED, "rewards.function=rewards/mine.py:digits")
        rows = run.table("rollouts", 1)
        rewarded(rows, 0.25)
        assert rows["digits"].to_pylist() == [
            sum(c.isdigit() for c in text) for text in rows["response"].to_pylist()
        ]
        spec = json.loads((run.url / "dag.json").read_text())
        assert "nodes.py:count_digits" in [node["run"] for node in spec["nodes"]]
        assert dag_from_spec(**spec).node("digits").fn is sys.modules["nodes.py"].count_digits
    finally:
        for name in set(sys.modules) - before:
            del sys.modules[name]
    assert not cloudpickle.list_registry_pickle_by_value()


def test_a_script_and_its_sibling_modules_run_on_workers_in_another_folder(
    project, cluster_address, digits_task, tmp_path
):
    command = [sys.executable, str(project / "script.py"), str(shipped("quickstart.yaml"))]
    settings = [
        *digits_overrides(digits_task, tmp_path / "run"),
        f"cluster.address={cluster_address}",
        "run.steps=1",
    ]
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        [*command, *settings],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=120,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    rows = Finished(tmp_path / "run", None).table("rollouts", 1)
    rewarded(rows, 0.25)
    assert "digits" in rows.column_names


def build(device, rank): ...


def plain(ctx, table, *, what: object): ...


def test_what_cannot_travel_is_refused_by_name():
    dag = DAG([Role("r", build)], [Node("a", partial(plain, what=threading.Lock()), role="r")])
    plan = compile_chains(dag, ["w"], make_schema({}))
    with pytest.raises(
        PlanError, match=r"cannot be sent to the workers: .*TypeError: cannot pickle '_thread.lock'"
    ):
        serialize_phases({"train": (plan, None)})


def test_a_package_that_a_worker_lacks_is_named(train, tmp_path, monkeypatch):
    """Files on the Python path, but neither under the working directory nor beside the script,
    are as if installed.
    """
    (tmp_path / "only_here.py").write_text(
        "def digits(prompt, response, answer, **extra): return 0.0\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(
        RunError,
        match=r"a worker cannot open .*ModuleNotFoundError: No module named 'only_here'; pack",
    ):
        train("lacking", "rewards.function=only_here:digits", "run.steps=1")
    del sys.modules["only_here"]
