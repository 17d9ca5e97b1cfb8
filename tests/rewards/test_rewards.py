import pytest

from siirl_dask.rewards import exact_match


@pytest.mark.parametrize(
    ("response", "answer", "reward"),
    [
        ("42", "42", 1.0),
        ("  42\n", "42 ", 1.0),
        ("42", 42, 1.0),
        ("4 2", "42", 0.0),
        ("the answer is 42", "42", 0.0),
        ("", "", 1.0),
    ],
)
def test_exact_match_minds_everything_but_white_space_around(response, answer, reward):
    given = exact_match("what?", response, answer)
    assert given == reward
    assert isinstance(given, float)


def test_columns_the_caller_adds_are_accepted():
    assert exact_match("p", "r", "r", data_source="gsm8k") == 1.0
