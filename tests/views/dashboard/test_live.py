"""The last two minutes of workers' pulses: stays are joined, old ones go, and rates are those of
the newest seconds.
"""

from hypothesis import given
from hypothesis import strategies as st

from siirl_dask.views.dashboard.live import IDLE, Live, node_of

PLACES = st.sampled_from(
    ["", "node 'rollout', train step 3", "node 'update', train step 3: the loading", "a task"]
)


def test_a_place_is_known_by_its_node():
    assert node_of("node 'old_logprobs', train step 12") == "old_logprobs"
    assert node_of("the joining of the process groups") == "the joining of the process groups"


@given(st.lists(st.tuples(st.integers(1, 30), PLACES, st.booleans()), min_size=1, max_size=60))
def test_stays_follow_one_another_are_bounded_and_end_now(looks):
    live, now, beats = Live(), 0.0, 0
    for seconds, place, waits in looks:
        now, beats = now + seconds, beats + 10
        live.note(now, {"0": (beats, place, waits)})
        own = live.stays["0"]
        assert own[-1].end == now
        assert own[-1].place == (node_of(place) or IDLE)
        assert all(
            before.end == after.start for before, after in zip(own, list(own)[1:], strict=False)
        )
        assert all(stay.end >= now - 120 for stay in own)
        assert live.rate("0") >= 0
    live.note(now + 1, {"1": (0, "", False)})
    assert list(live.stays) == ["1"], "a worker that left is forgotten"


def test_a_rate_counts_what_got_done_lately():
    live = Live()
    for second in range(40):
        live.note(
            float(second),
            {"0": (second * (2 if second < 20 else 5), f"node '{'ab'[second % 2]}', x", False)},
        )
    assert 4 < live.rate("0") <= 6
    assert live.rate("nobody") == 0
