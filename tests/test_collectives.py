"""Process groups listen at the worker's own address."""

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from siirl_dask import collectives
from siirl_dask.errors import ConfigError

NAMES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "HCCL_SOCKET_IFNAME", "HCCL_SOCKET_FAMILY")


@pytest.fixture
def environment(monkeypatch):
    """The environment without what names interfaces, and as it was afterwards."""
    for name in NAMES:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    return monkeypatch


def test_each_backend_is_told_the_interface_of_the_address_and_no_other_with_its_prefix(
    environment,
):
    collectives.listen_at(collectives.LOOPBACK)
    loopback = collectives.interface_of(collectives.LOOPBACK)
    assert [os.environ[name] for name in NAMES] == [
        loopback,
        f"={loopback}",
        f"={loopback}",
        "AF_INET",
    ]


def test_an_interface_that_the_user_named_for_accelerators_is_kept_and_gloo_follows_the_worker(
    environment,
):
    for name in NAMES[:3]:
        environment.setenv(name, "fast0")
    collectives.listen_at(collectives.LOOPBACK)
    assert [os.environ[name] for name in NAMES[:3]] == [
        collectives.interface_of(collectives.LOOPBACK),
        "fast0",
        "fast0",
    ]


def test_groups_made_in_a_process_that_is_no_workers_leave_its_environment_as_it_was(environment):
    for before in (None, "eth7"):
        if before:
            environment.setenv(NAMES[0], before)
        with collectives.listening_at(collectives.LOOPBACK):
            assert os.environ[NAMES[0]] == collectives.interface_of(collectives.LOOPBACK)
        assert os.environ.get(NAMES[0]) == before


def test_an_address_that_is_on_no_interface_is_refused_with_those_that_are():
    with pytest.raises(
        ConfigError, match=r"192\.0\.2\.1, which no network interface .*127\.0\.0\.1.*--host"
    ):
        collectives.listen_at("192.0.2.1")


@given(st.lists(st.integers(0, 1000), unique=True, min_size=1))
def test_a_rank_stays_at_its_place_in_a_torch_that_sorts_the_ranks_of_a_group(ranks):
    placed = [collectives._RankAtPlace(rank, place) for place, rank in enumerate(ranks)]
    assert sorted(placed) == ranks
    assert [*map(str, sorted(placed))] == [*map(str, ranks)]  # torch makes a name of them
    assert dict(zip(placed, placed, strict=True)) == dict(zip(ranks, ranks, strict=True))
