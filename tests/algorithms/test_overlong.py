import pytest
import torch
from torch.testing import assert_close

from siirl_dask.algorithms import overlong_penalty

LENGTHS = torch.tensor([0, 3000, 3584, 3840, 4096, 5000])


def test_hand_checked_values():
    penalty = overlong_penalty(LENGTHS, max_length=4096, buffer=512)
    assert_close(penalty, torch.tensor([0.0, 0.0, 0.0, -0.5, -1.0, -1.0]))
    assert penalty.dtype == torch.float32


def test_the_factor_scales_the_penalty():
    penalty = overlong_penalty(LENGTHS, max_length=4096, buffer=512, factor=0.5)
    assert_close(penalty, torch.tensor([0.0, 0.0, 0.0, -0.25, -0.5, -0.5]))


def test_a_buffer_of_the_whole_length_penalises_every_token():
    assert_close(
        overlong_penalty(torch.tensor([0, 1, 4]), max_length=4, buffer=4),
        torch.tensor([0.0, -0.25, -1.0]),
    )


def test_no_rows_give_no_penalties():
    assert overlong_penalty(torch.zeros(0, dtype=torch.int64), max_length=4, buffer=2).shape == (0,)


@pytest.mark.parametrize("buffer", [0, -1, 5])
def test_a_buffer_outside_the_length_is_refused(buffer):
    with pytest.raises(ValueError, match="expected 1 to max_length=4"):
        overlong_penalty(LENGTHS, max_length=4, buffer=buffer)
