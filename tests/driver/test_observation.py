"""Profiles and backends of metrics that a run cannot have are refused before anything starts."""

from __future__ import annotations

import pytest

from siirl_dask import grpo
from siirl_dask.config.file import load, shipped
from siirl_dask.driver.checks.preflight import check_observation
from siirl_dask.driver.phases import plan_phases, worker_names
from siirl_dask.errors import ConfigError
from siirl_dask.planner import Phase

NEEDED = [
    "data.url=none",
    "data.prepare=null",
    "model.path=none",
    "validation.url=null",
    "validation.test_url=null",
]


@pytest.fixture(scope="module")
def planned():
    placed = "cluster.placement={rollout: [0], policy: [1, 2]}"
    config = load(shipped("quickstart.yaml"), [*NEEDED, "cluster.workers=3", placed])
    return plan_phases(config, grpo(config), None, worker_names(config), assume_columns=True)[
        Phase.TRAIN
    ][0]


def check(planned, *asked):
    check_observation(load(shipped("quickstart.yaml"), [*NEEDED, "run.steps=9", *asked]), planned)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (
            ["profile.roles=[polcy]"],
            r"profile\.roles=\['polcy'\]: the DAG has no role 'polcy' .*did you mean 'policy'",
        ),
        (
            ["profile.steps=[3, 10]"],
            r"profile\.steps=\[3, 10\]: step 10 is none of 1 to run\.steps=9",
        ),
        (
            ["profile.steps=[3]", "profile.ranks=[0, 3]"],
            r"profile\.ranks=\[0, 3\]: rank 3 .*0 to 2",
        ),
        (
            ["profile.steps=[3]", "profile.ranks=[1]", "profile.roles=[rollout]"],
            r"rank 1 .* 0 to 0",
        ),
    ],
    ids=["role", "step", "rank", "rank of the role"],
)
def test_a_profile_of_what_is_not_there_is_refused_by_name(planned, asked, said):
    with pytest.raises(ConfigError, match=said):
        check(planned, *asked)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ("profile.steps=[0]", r"profile\.steps=0: expected at least 1"),
        ("profile.ranks=[-1]", r"profile\.ranks=-1: expected at least 0"),
        ("profile.steps=3", r"profile\.steps=3: expected a list"),
        ("profile.level=memroy", r"profile\.level='memroy'.*did you mean 'memory'"),
        ("profile.step=[3]", r"did you mean .*steps"),
    ],
)
def test_a_value_that_is_none_is_refused_with_the_key(planned, asked, said):
    with pytest.raises(ConfigError, match=said):
        check(planned, asked)


def test_what_is_there_passes(planned):
    check(planned)
    check(
        planned,
        "profile.steps=[1, 9]",
        "profile.roles=[policy]",
        "profile.ranks=[0, 1]",
        "profile.level=stacks",
    )
    check(planned, "profile.steps=[2]", "profile.ranks=[]")
    check(planned, "observe.backends=[parquet]")
