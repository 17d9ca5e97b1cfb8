"""The end of a run that has failed says how far it came, where the logs are, and the command
that resumes it.
"""

import shlex

import pytest
from hypothesis import given
from hypothesis import strategies as st

from siirl_dask.commands.program.parsing import parse
from siirl_dask.commands.script import overrides_of, resuming
from siirl_dask.config import ClusterConfig, Config, RunConfig
from siirl_dask.driver.failure_text import failure_text, run_failure_of
from siirl_dask.errors import Fenced, Interrupted, NodeError, Origin
from siirl_dask.worker.named_errors import named_errors, portable

WORDS = st.text(st.characters(codec="ascii", exclude_categories=["Cc"]), min_size=1, max_size=8)


@given(WORDS, st.lists(WORDS), st.none() | WORDS, st.booleans(), st.booleans())
def test_the_command_that_is_shown_starts_the_same_run_and_never_removes_it(
    name, values, cluster, fresh, force
):
    config, overrides = f"c{name}.yaml", [f"run.name={value}" for value in values]
    given = [
        "run",
        config,
        *overrides,
        *(["--fresh"] if fresh else []),
        *(["--force"] if force else []),
    ]
    options = parse([*given, *([] if cluster is None else [f"--cluster={cluster}"])])
    program, *words = shlex.split(resuming(options))
    again = parse(words)
    assert (program, again.command, again.config) == ("siirl-dask", "run", config)
    assert overrides_of(again) == overrides_of(options)
    assert (again.fresh, again.force) == (False, force)


@pytest.mark.parametrize(
    ("cluster", "logs"),
    [
        (ClusterConfig(), "worker '2' wrote to this terminal"),
        (
            ClusterConfig(address="tcp://h:1"),
            "worker '2' on host 'h' are the output of its `dask worker`",
        ),
        (
            ClusterConfig(spec="slurm.yaml"),
            "worker '2' on host 'h' are where slurm.yaml has the cluster write them",
        ),
    ],
)
def test_the_end_says_where_the_run_goes_on_and_whose_logs_are_where(tmp_path, cluster, logs):
    error = NodeError("it broke")
    error.origin = Origin(worker="2", host="h", node="reward")
    config = Config(run=RunConfig(url=str(tmp_path / "run"), steps=9), cluster=cluster)
    run, said, look, resume = failure_text(config, error, 3, "siirl-dask run mine.yaml")
    assert run.endswith("run: 3 of 9 steps are done; it goes on at step 1: there is no checkpoint")
    assert logs in said
    assert resume == "resume   siirl-dask run mine.yaml"
    assert look == f"look     siirl-dask serve {tmp_path / 'run'}"
    for silent in (Fenced("x"), Interrupted("x")):
        assert failure_text(config, silent, 3, "siirl-dask run mine.yaml") == []


def test_where_a_failure_comes_from_survives_its_way_to_the_driver():
    origin = Origin(worker="2", node="reward", iteration="train step 3")
    with pytest.raises(NodeError) as raised, named_errors("node 'reward'", NodeError, origin):
        raise KeyError("missing")
    failure = run_failure_of(portable(raised.value, "2"), "again")
    assert (failure.worker, failure.node, failure.iteration) == ("2", "reward", "train step 3")
    assert (failure.kind, failure.message) == ("NodeError", "node 'reward': KeyError: 'missing'")
    assert failure.host
    assert failure.resume == "again"


def test_a_lack_of_memory_says_what_to_look_at():
    with pytest.raises(NodeError) as raised, named_errors("node 'update'", NodeError):
        raise MemoryError
    assert "siirl-dask plan CONFIG" in raised.value.__notes__[-1]
