"""Tests of requests and samples as messages between workers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from siirl_dask.errors import PeerError
from siirl_dask.rollout import FinishReason, Generation, GenerationRequest, Sampling
from siirl_dask.rollout.requests import Sampled, pack_request, pack_sampled, read_request, read_sampled

REQUEST = GenerationRequest([1, 2, 3], 2**63 - 1, Sampling(max_tokens=4, temperature=0.5))
SAMPLED = Sampled(Generation([7, 8], [-0.1, -2.5], FinishReason.STOP), "w3")


@given(
    prompt=st.lists(st.integers(0, 2**31), max_size=9),
    seed=st.integers(0, 2**63 - 1),
    sampling=st.builds(
        Sampling,
        max_tokens=st.integers(1, 99),
        temperature=st.floats(0, 2),
        top_k=st.integers(0, 9),
        stop_token_ids=st.lists(st.integers(0, 2**31), max_size=3).map(tuple),
    ),
)
def test_a_request_survives_packing(prompt, seed, sampling):
    request = GenerationRequest(prompt, seed, sampling)
    assert read_request(pack_request(request, 5), 5) == request


@given(
    rows=st.lists(st.tuples(st.integers(0, 2**31), st.floats(-100, 0)), max_size=9),
    reason=st.sampled_from(FinishReason),
)
def test_a_sample_survives_packing(rows, reason):
    sampled = Sampled(Generation([token for token, _ in rows], [logprob for _, logprob in rows], reason), "w1")
    assert read_sampled(pack_sampled(sampled)) == sampled


def test_a_request_for_other_weights_is_refused_by_version():
    with pytest.raises(PeerError, match="version 4: those here are 5"):
        read_request(pack_request(REQUEST, 4), 5)


@pytest.mark.parametrize(
    "change",
    [
        {"prompt": b"123"},
        {"prompt": [1]},
        {"seed": "1"},
        {"sampling": {}},
        {"sampling": {"max_tokens": "x"}},
        {"sampling": {**pack_request(REQUEST, 1)["sampling"], "stop_token_ids": ["x"]}},
        {"sampling": {**pack_request(REQUEST, 1)["sampling"], "stop_token_ids": None}},
    ],
)
def test_anything_but_a_request_is_refused(change):
    with pytest.raises(PeerError, match="received"):
        read_request({**pack_request(REQUEST, 1), **change}, 1)


@pytest.mark.parametrize(
    "change",
    [{"tokens": b""}, {"logprobs": b"x" * 8}, {"logprobs": b"\xff" * 16}, {"reason": "bored"}, {"worker": 3}],
)
def test_anything_but_a_sample_is_refused(change):
    with pytest.raises(PeerError, match="received"):
        read_sampled({**pack_sampled(SAMPLED), **change})
