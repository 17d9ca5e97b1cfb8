"""Workers get what plans are computed from, and plan for themselves: what they execute is what
was planned.
"""

import hashlib
import os
import pickle
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

from hypothesis import given, settings

from siirl_dask.coordinator.dataloader import Source
from siirl_dask.planner import DAG, Node, Phase, Plan, Role, compile_chains
from siirl_dask.worker.peers.data_plane import DataSettings
from siirl_dask.worker.run_spec import RunSpec, deserialize_phases, serialize_phases
from tests.planner.random_dags import QUICKLY, SOURCE, build, plans, same_rows

ROOT = Path(__file__).parents[2]
DATA = Source(url="data", prompt="prompt", answer="answer")
IN_ANOTHER_PROCESS = """
import pickle, sys
from siirl_dask.worker.run_spec import deserialize_phases
parcels = pickle.load(sys.stdin.buffer)
from tests.worker.test_run_spec import shown
for parcel, workers in parcels:
    print(shown(deserialize_phases(parcel, workers)["train"][0]))
"""


def shown(plan: Plan) -> str:
    """Return a digest of everything in a plan; functions that were sent by value lie elsewhere
    in each process.
    """
    parts = (plan.placement, plan.edges, plan.chains, plan.streams)
    return hashlib.sha256(re.sub(" at 0x[0-9a-f]+", "", repr(parts)).encode()).hexdigest()


def differing(made: Plan, given: Plan) -> list[str]:
    return [
        field.name
        for field in fields(Plan)
        if getattr(made, field.name) != getattr(given, field.name)
    ]


@QUICKLY
@given(plans())
def test_a_worker_plans_what_the_driver_planned(plan):
    phases = {Phase.TRAIN: (plan, DATA), Phase.VALIDATION: (plan, DATA)}
    back = deserialize_phases(serialize_phases(phases), list(plan.chains))
    assert list(back) == list(phases)
    for made, source in back.values():
        assert source == DATA
        assert not differing(made, plan)


def test_each_start_of_a_run_has_a_secret_of_its_own_that_is_carried_and_not_shown():
    first, second = (
        RunSpec(
            run="r",
            url="",
            seed=0,
            members={},
            phases=b"",
            builds_from=Phase.TRAIN,
            threads=1,
            data=DataSettings(),
            retry_seconds=0,
        )
        for _ in range(2)
    )
    assert len(first.secret) >= 16
    assert first.secret != second.secret
    assert pickle.loads(pickle.dumps(first)).secret == first.secret
    assert "secret" not in repr(first)
    assert repr(first.secret) not in repr(first)


def test_a_process_that_hashes_otherwise_plans_the_same():
    """Sets are gone through in another order there."""
    planned: list[Plan] = []

    @settings(QUICKLY, max_examples=50)
    @given(plans())
    def collect(plan):
        planned.append(plan)

    # started first: it imports while plans are drawn, and without processes none is drawn for it
    with subprocess.Popen(
        [sys.executable, "-c", IN_ANOTHER_PROCESS],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONHASHSEED": "1"},
        cwd=ROOT,
    ) as other:
        collect()
        parcels = [
            (serialize_phases({Phase.TRAIN: (plan, DATA)}), list(plan.chains)) for plan in planned
        ]
        shown_there, errors = other.communicate(pickle.dumps(parcels), timeout=120)
    assert other.returncode == 0, errors.decode()
    assert shown_there.decode().split() == [shown(plan) for plan in planned]


def test_a_parcel_grows_by_a_few_bytes_a_worker():
    dag = DAG(
        [Role("a", build)], [Node(f"n{i}", same_rows, role="a", save_as=f"t{i}") for i in range(10)]
    )
    sizes = []
    for count in (16, 1024):
        plan = compile_chains(dag, [str(i) for i in range(count)], SOURCE)
        sizes.append(len(serialize_phases({Phase.TRAIN: (plan, DATA)})))
    assert sizes[1] - sizes[0] < 4 * (1024 - 16)
