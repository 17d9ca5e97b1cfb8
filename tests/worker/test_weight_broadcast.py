"""How announced tensors are cut into buffers."""

from __future__ import annotations

from contextlib import nullcontext
from itertools import pairwise

import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from siirl_dask.errors import NodeError, PeerError
from siirl_dask.schema import PARAMETER_DTYPE, PARAMETER_SHAPE, TYPES
from siirl_dask.worker.stop import StopFlag
from siirl_dask.worker.weight_broadcast import Broadcast, cut

DTYPES = st.sampled_from(["float32", "bfloat16", "float16"])
SHAPES = st.lists(st.integers(0, 9), max_size=3)


def told(rows):
    columns = {PARAMETER_DTYPE: [dtype for dtype, _ in rows], PARAMETER_SHAPE: [shape for _, shape in rows]}
    return pa.table({name: pa.array(values, TYPES[name]) for name, values in columns.items()})


@given(rows=st.lists(st.tuples(DTYPES, SHAPES), max_size=20), most=st.integers(1, 3000))
def test_each_tensor_has_a_place_of_its_own_in_order_and_a_buffer_no_more_than_it_may(rows, most):
    buffers = list(cut(told(rows), most))
    assert [(place.dtype, list(place.shape)) for places in buffers for place in places] == [
        (getattr(torch, dtype), shape) for dtype, shape in rows
    ]
    for places in buffers:
        assert len(places) == 1 or places[-1].stop <= most
        buffer = torch.zeros(places[-1].stop, dtype=torch.uint8)
        for number, place in enumerate(places):
            place.within(buffer).fill_(number + 1)
        for number, place in enumerate(places):  # none was written over by those that follow
            assert (place.within(buffer) == number + 1).all()
    for places, following in pairwise(buffers):
        assert sum(place.stop - place.start for place in (*places, following[0])) + 16 * len(places) > most


@pytest.mark.parametrize(
    "row", [("Tensor", [2]), ("float33", [2]), (None, [2]), ("float32", None), ("float32", [3, -1])]
)
def test_what_tells_of_no_tensor_is_refused(row):
    with pytest.raises(PeerError, match=r"a tensor of dtype .* was announced: expected those of a tensor"):
        list(cut(told([("float32", [1]), row]), 100))


@pytest.mark.parametrize(
    ("rows", "tensors", "said"),
    [
        ([("float32", [2])], [torch.zeros(3)], r"torch.float32 of shape \[2\], and its node gave torch.float32 of"),
        ([("float32", [2])], [torch.zeros(2, dtype=torch.float16)], "and its node gave torch.float16"),
        ([("float32", [2])], [], "and its node gave none"),
        ([], [torch.zeros(3)], "0 tensors, and its node gave more"),
    ],
)
def test_a_node_that_gives_other_tensors_than_it_announced_is_refused_before_they_are_sent(rows, tensors, said):
    nobody = Broadcast(members=("w0", "w1"), group=object(), root=0, device="cpu", stop=StopFlag(), most=100)
    with pytest.raises(NodeError, match=f"worker 'w0' announced .*{said}"):
        nobody.send(told(rows), iter(tensors), nullcontext)
