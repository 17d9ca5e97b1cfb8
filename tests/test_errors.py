"""Words that messages share."""

import pytest

from siirl_dask.errors import counted


@pytest.mark.parametrize(
    ("number", "said"), [(0, "0 tokens"), (1, "1 token"), (2, "2 tokens"), (1024, "1,024 tokens")]
)
def test_one_thing_is_not_several(number, said):
    assert counted(number, "token") == said
