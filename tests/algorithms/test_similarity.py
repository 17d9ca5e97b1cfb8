"""Distances and rewards of SRPO, by hand."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from siirl_dask.algorithms import nearest_distances, srpo_rewards


def test_the_nearest_centre_counts():
    centres = torch.tensor([[0.0, 0.0], [10.0, 0.0]])
    assert nearest_distances(torch.tensor([[3.0, 4.0], [10.0, 2.0]]), centres).tolist() == [
        5.0,
        2.0,
    ]


def test_rewards_fall_with_the_distance_from_06():
    given = srpo_rewards(torch.tensor([1.0, 3.0, 2.0, 1.5]))
    # .6 sigmoid(5), .6 sigmoid(-5), .6 / 2, .6 sigmoid(2.5)
    torch.testing.assert_close(
        given, torch.tensor([0.595984, 0.004016, 0.3, 0.554485]), atol=1e-6, rtol=0
    )


def test_failures_that_are_all_alike_get_the_middle():
    torch.testing.assert_close(srpo_rewards(torch.tensor([2.0, 2.0])), torch.tensor([0.3, 0.3]))
    torch.testing.assert_close(srpo_rewards(torch.tensor([7.0])), torch.tensor([0.3]))
    assert srpo_rewards(torch.zeros(0)).shape == (0,)


@given(distances=st.lists(st.floats(0, 100), min_size=2, max_size=8))
def test_a_nearer_failure_never_gets_less_and_none_as_much_as_a_success(distances):
    given = srpo_rewards(torch.tensor(distances, dtype=torch.float64)).tolist()
    order = sorted(range(len(distances)), key=distances.__getitem__)
    assert [given[at] for at in order] == sorted(given, reverse=True)
    assert 0 < min(given) <= max(given) < 0.6
