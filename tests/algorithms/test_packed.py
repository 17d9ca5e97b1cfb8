import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from siirl_dask.algorithms import row_maxima, row_means, row_sums, spread

ROWS = st.lists(st.lists(st.floats(-10, 10), max_size=4), max_size=6)


def pack(rows):
    values = torch.tensor([value for row in rows for value in row], dtype=torch.float64)
    return values, torch.tensor([0, *map(len, rows)]).cumsum(0)


@given(rows=ROWS)
def test_each_row_is_summed_and_averaged_by_itself(rows):
    values, offsets = pack(rows)
    sums = torch.tensor([sum(row) for row in rows], dtype=torch.float64)
    means = torch.tensor([sum(row) / len(row) if row else 0.0 for row in rows], dtype=torch.float64)
    assert_close(row_sums(values, offsets), sums)
    assert_close(row_means(values, offsets), means)
    maxima = torch.tensor([max(row, default=0.0) for row in rows], dtype=torch.float64)
    assert torch.equal(row_maxima(values, offsets), maxima)


@given(rows=ROWS)
def test_a_rows_number_is_repeated_for_each_of_its_tokens(rows):
    _, offsets = pack(rows)
    numbers = torch.arange(len(rows)).float()
    expected = [float(row) for row, tokens in enumerate(rows) for _ in tokens]
    assert spread(numbers, offsets).tolist() == expected


def test_sums_of_integers_are_integers():
    lengths = row_sums(torch.tensor([True, False, True]).long(), torch.tensor([0, 2, 2, 3]))
    assert lengths.dtype == torch.int64
    assert lengths.tolist() == [1, 0, 1]


def test_a_nonfinite_value_stays_in_its_row():
    offsets = torch.tensor([0, 2, 4])
    assert row_sums(torch.tensor([1.0, torch.nan, 2.0, 3.0]), offsets).isfinite().tolist() == [
        False,
        True,
    ]
    assert row_means(torch.tensor([1.0, torch.inf, 2.0, 3.0]), offsets).isfinite().tolist() == [
        False,
        True,
    ]


def test_gradients_are_right_and_finite_beside_empty_rows():
    offsets = torch.tensor([0, 0, 3, 3, 4, 4])
    values = torch.tensor([1.0, -2.0, 0.5, 3.0], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: row_sums(x, offsets), values)
    assert torch.autograd.gradcheck(lambda x: row_means(x, offsets), values)
    per_row = torch.arange(5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: spread(x, offsets), per_row)
    row_means(values, offsets).sum().backward()
    assert_close(values.grad, torch.tensor([1 / 3, 1 / 3, 1 / 3, 1.0], dtype=torch.float64))
