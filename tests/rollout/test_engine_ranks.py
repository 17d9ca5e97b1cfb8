"""Tests of how an engine's ranks meet. Few imports: each process of a test imports them."""

from dataclasses import replace

import pytest

from siirl_dask.errors import ConfigError
from siirl_dask.rollout.vllm_engine.process_groups import EngineRanks
from siirl_dask.testing.ranks import run_ranks


def meet(rank):
    role = replace(rank, side_group=rank.group)
    with pytest.raises(
        ConfigError, match=r"tensor_parallel_size=3: expected a divisor of the role's 4 workers"
    ):
        EngineRanks(role, 3)
    first, second = EngineRanks(role, 2), EngineRanks(role, 2)
    message = bytes([rank.rank]) * (rank.rank % 3 * 1000)
    heard = (
        [len(one) for one in first.gather(message)],
        [sum(one) for one in second.gather(message)],
    )
    return [
        first.rank,
        *heard,
        [first.name, second.name],
        EngineRanks(role, 1).gather(message) == [message],
    ]


def test_neighbours_form_an_engine_and_gather_among_themselves(tmp_path):
    given = run_ranks(4, meet, tmp_path)
    assert [place for place, *_ in given] == [0, 1, 0, 1]
    assert [heard for _, *heard, _, _ in given] == [[[0, 1000], [0, 1000]]] * 2 + [
        [[2000, 0], [4000, 0]]
    ] * 2
    names = [names for *_, names, _ in given]
    assert names[0] == names[1]
    assert names[2] == names[3]
    assert len({name for pair in names for name in pair}) == 4
    assert all(alone for *_, alone in given)
