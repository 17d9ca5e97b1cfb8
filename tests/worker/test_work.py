"""The load of a worker reaches the page as it was, and a message that is none counts for
nothing.
"""

import json
from dataclasses import asdict

from hypothesis import given
from hypothesis import strategies as st

from siirl_dask.worker.monitoring.work import SUFFIX, Work

LOADS = st.builds(
    Work,
    requests=st.integers(0, 2**31),
    waiting=st.integers(0, 2**31),
    cache=st.floats(0, 1),
    arena=st.integers(0, 2**50),
    unacked=st.integers(0, 2**50),
    device=st.integers(0, 2**50),
)


@given(load=LOADS)
def test_a_heartbeat_brings_the_load_as_it_was(load):
    told = json.loads(json.dumps(asdict(load)))
    assert Work.of({"siirl-a" + SUFFIX: told}, "siirl-a") == load


def test_a_message_that_is_no_load_counts_for_nothing():
    whole = asdict(Work(requests=1))
    for wrong in (
        None,
        [],
        "many",
        {},
        {**whole, "arena": -1},
        {**whole, "cache": "full"},
        {"requests": 3},
    ):
        assert Work.of({"siirl-a" + SUFFIX: wrong}, "siirl-a") == Work(), wrong
    assert Work.of({"siirl-b" + SUFFIX: whole}, "siirl-a") == Work(), "the load of another run"
