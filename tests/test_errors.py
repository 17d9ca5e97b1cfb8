"""Words that messages share."""

import pytest

from siirl_dask.errors import clause, counted


@pytest.mark.parametrize(
    ("number", "said"), [(0, "0 tokens"), (1, "1 token"), (2, "2 tokens"), (1024, "1,024 tokens")]
)
def test_one_thing_is_not_several(number, said):
    assert counted(number, "token") == said


@pytest.mark.parametrize(
    ("error", "said"),
    [("It is cut off.", "It is cut off"), ("cut off", "cut off"), ("and so on...", "and so on...")],
)
def test_a_sentence_goes_on_behind_an_error_with_one_stop(error, said):
    assert clause(ValueError(error)) == said
    assert clause(f"{error}\n") == said
