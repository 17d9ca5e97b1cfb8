"""``rollout.weight_sync``: a plan says how new weights travel, and impossible ways are refused
before the start.
"""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from siirl_dask.commands.plan import describe_run
from siirl_dask.config.file import load_config_file, shipped
from siirl_dask.driver.phases import dags
from siirl_dask.driver.run import run
from siirl_dask.errors import PlanError
from siirl_dask.nodes import publish_weights
from siirl_dask.planner import DAG, columns
from siirl_dask.planner.contract import contract_of
from tests.conftest import digits_overrides

APART = "cluster.placement={rollout: [0, 1], reward: [0, 1], policy: [2, 3]}"
OVER = "cluster.placement={rollout: [0, 1], reward: [0, 1], policy: [1, 2, 3]}"
# the role of the reward is on all workers
SHARED = "cluster.placement={rollout: [0, 1], policy: [2, 3]}"
BROADCAST = "rollout.weight_sync=broadcast"


@columns(
    writes={field.name: field.type for field in contract_of(publish_weights).writes},
    new_rows=True,
    passes=False,
)
def publish_rows(ctx, table):
    """A source of weights of one's own, which has no tensors."""
    return publish_weights(ctx, table)


@pytest.fixture
def files(digits_task, tmp_path):
    def read(*overrides):
        return load_config_file(
            shipped("quickstart.yaml"),
            [*digits_overrides(digits_task, tmp_path / "run"), APART, *overrides],
        )

    return read


def notes(file):
    return re.findall("note: (new weights.*)", describe_run(file.config, *dags(file)))


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            (),
            "by broadcast from worker 2 to 0, 1 if workers 0..3 (4) have an accelerator each, else "
            "as rows",
        ),
        ((BROADCAST,), "by broadcast from worker 2 to 0, 1"),
        (("rollout.weight_sync=rows",), "as rows: rollout.weight_sync=rows"),
        ((OVER,), "as rows: worker '1' has both roles, 'policy' and 'rollout' (cluster.placement)"),
        (
            ("rollout.max_staleness=1",),
            "by broadcast from worker 2 to 0, 1 if workers 0..3 (4) have an accelerator each, else "
            "as rows",
        ),
        (
            ("rollout.max_staleness=1", SHARED),
            "as rows: node 'load_weights' is 1 step behind (rollout.max_staleness), and its "
            "workers also wait for "
            "those of role 'policy' elsewhere: give them no role in common (cluster.placement)",
        ),
    ],
)
def test_a_plan_says_which_way_weights_take(files, overrides, said):
    assert notes(files(*overrides)) == [f"new weights (weights -> load_weights) go {said}"]


def test_weights_that_stay_on_their_worker_are_not_spoken_of(files):
    assert notes(files("cluster.workers=1", "cluster.placement={}")) == []


def test_weights_that_stay_on_each_of_several_workers_are_said_to(files):
    assert notes(files("cluster.placement={}")) == [
        "new weights (weights -> load_weights) stay on their workers: each engine loads what its "
        "trainer has gathered"
    ]


@pytest.mark.parametrize(
    ("overrides", "changed", "said"),
    [
        ((OVER,), {}, "worker '1' has both roles, 'policy' and 'rollout'"),
        (("cluster.placement={}",), {}, "worker '0' has both roles"),
        (("rollout.max_staleness=1", SHARED), {}, "node 'load_weights' is 1 step behind"),
        (
            (),
            {"fn": publish_rows, "options": {}},
            "publish_rows and .*load_weights do not both handle",
        ),
        ((), {"save_as": "weights"}, "the table of node 'weights' is saved, has other readers"),
    ],
)
def test_a_broadcast_that_cannot_be_is_refused_by_plan_and_run(files, overrides, changed, said):
    file = files(BROADCAST, *overrides)
    dag, validation = dags(file)
    dag = DAG(
        dag.roles,
        tuple(replace(node, **changed) if node.name == "weights" else node for node in dag.nodes),
    )
    expected = (
        "rollout.weight_sync=broadcast, .*node 'weights' to node 'load_weights': "
        f".*{said}.*weight_sync=auto"
    )
    with pytest.raises(PlanError, match=expected):
        describe_run(file.config, dag, validation)
    with pytest.raises(PlanError, match=expected):
        run(file.config, dag, validation)
