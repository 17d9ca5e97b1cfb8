"""Parameters are divided among replicas evenly, as far as whole ones can be."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip(
    "megatron.core", reason="needs megatron-core: pip install 'siirl_dask[megatron]'"
)

from siirl_dask.training.megatron.divided import divide

SIZES = st.dictionaries(
    st.text(min_size=1, max_size=3), st.integers(0, 1000), min_size=1, max_size=40
)


@given(SIZES, st.integers(1, 12))
def test_each_is_in_one_part_and_no_part_has_more_than_its_share_and_the_largest(sizes, parts):
    divided = divide(sizes, parts)
    assert sorted(name for part in divided for name in part) == sorted(sizes)
    assert len(divided) == parts
    most = max(sum(sizes[name] for name in part) for part in divided)
    assert most <= sum(sizes.values()) / parts + max(sizes.values())
    assert all(divided) == (len(sizes) >= parts)
