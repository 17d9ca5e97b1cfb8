"""Tests of requests and samples as messages between workers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from siirl_dask.errors import PeerError
from siirl_dask.images import Image
from siirl_dask.rollout import FinishReason, Generation, GenerationRequest, Sampling
from siirl_dask.rollout.requests import RequestMessage, Sampled, pack_sampled, read_sampled

REQUEST = GenerationRequest([1, 2, 3], 2**63 - 1, Sampling(max_tokens=4, temperature=0.5))
IMAGES = st.builds(Image, st.binary(min_size=1, max_size=2)) | st.builds(
    Image, st.none(), st.text(min_size=1, max_size=5)
)
SAMPLED = Sampled(Generation([7, 8], [-0.1, -2.5], FinishReason.STOP), "w3")
OF_TWO = Sampled(Generation([7, 8], [-0.1, -2.5], FinishReason.STOP, versions=[3, 4]), "w3")


def pack(request, version):
    return RequestMessage(version).pack(request)


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
    images=st.lists(st.lists(IMAGES, max_size=3).map(tuple), min_size=1, max_size=4),
)
def test_requests_survive_packing_and_bytes_travel_once_in_a_message(
    prompt, seed, sampling, images
):
    requests = [GenerationRequest(prompt, seed, sampling, images=each) for each in images]
    packed = [*map(RequestMessage(5).pack, requests)]
    assert [*map(RequestMessage(5).read, packed)] == requests
    sent = [image["bytes"] for message in packed for image in message["images"] if "bytes" in image]
    assert sorted(sent) == sorted(
        {image.data for each in images for image in each if image.data is not None}
    )


def test_a_request_may_name_only_images_of_its_own_message():
    request = GenerationRequest([1], 2, Sampling(max_tokens=1), images=(Image(b"picture"),))
    sender = RequestMessage(5)
    first, second = sender.pack(request), sender.pack(request)
    receiver = RequestMessage(5)
    assert receiver.read(first).images[0] is receiver.read(second).images[0]
    with pytest.raises(PeerError, match="which is no image"):
        RequestMessage(5).read(second)


@given(
    rows=st.lists(st.tuples(st.integers(0, 2**31), st.floats(-100, 0)), max_size=9),
    reason=st.sampled_from(FinishReason),
)
def test_a_sample_survives_packing(rows, reason):
    sampled = Sampled(
        Generation([token for token, _ in rows], [logprob for _, logprob in rows], reason), "w1"
    )
    assert read_sampled(pack_sampled(sampled)) == sampled


def test_the_versions_of_a_sample_travel_with_it():
    assert read_sampled(pack_sampled(OF_TWO)) == OF_TWO


def test_a_request_for_other_weights_is_refused_by_version():
    with pytest.raises(PeerError, match="version 4: those here are 5"):
        RequestMessage(5).read(pack(REQUEST, 4))


@pytest.mark.parametrize(
    "change",
    [
        {"prompt": b"123"},
        {"prompt": [1]},
        {"seed": "1"},
        {"sampling": {}},
        {"sampling": {"max_tokens": "x"}},
        {"sampling": {**pack(REQUEST, 1)["sampling"], "stop_token_ids": ["x"]}},
        {"sampling": {**pack(REQUEST, 1)["sampling"], "stop_token_ids": None}},
        {"images": None},
        {"images": [b"picture"]},
        {"images": [{"bytes": "picture"}]},
        {"images": [{"path": None}]},
        {"images": [{"seen": b"0" * 32}]},
    ],
)
def test_anything_but_a_request_is_refused(change):
    with pytest.raises(PeerError, match="received"):
        RequestMessage(1).read({**pack(REQUEST, 1), **change})


@pytest.mark.parametrize(
    "change",
    [
        {"tokens": b""},
        {"logprobs": b"x" * 8},
        {"logprobs": b"\xff" * 16},
        {"reason": "bored"},
        {"worker": 3},
        {"versions": b"\0" * 8},
        {"versions": b"\xff" * 16},
        {"versions": [3, 4]},
    ],
)
def test_anything_but_a_sample_is_refused(change):
    with pytest.raises(PeerError, match="received"):
        read_sampled({**pack_sampled(SAMPLED), **change})
