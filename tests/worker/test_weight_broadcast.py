"""Weight broadcasts: announced tensors are cut into buffers, and bad announcements are refused."""

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


def index_of(rows):
    columns = {
        PARAMETER_DTYPE: [dtype for dtype, _ in rows],
        PARAMETER_SHAPE: [shape for _, shape in rows],
    }
    return pa.table({name: pa.array(values, TYPES[name]) for name, values in columns.items()})


@given(rows=st.lists(st.tuples(DTYPES, SHAPES), max_size=20), max_bytes=st.integers(1, 3000))
def test_slots_are_disjoint_in_order_and_within_the_buffer(rows, max_bytes):
    buffers = list(cut(index_of(rows), max_bytes))
    assert [(slot.dtype, list(slot.shape)) for slots in buffers for slot in slots] == [
        (getattr(torch, dtype), shape) for dtype, shape in rows
    ]
    for slots in buffers:
        assert len(slots) == 1 or slots[-1].stop <= max_bytes
        buffer = torch.zeros(slots[-1].stop, dtype=torch.uint8)
        for number, slot in enumerate(slots):
            slot.view(buffer).fill_(number + 1)
        for number, slot in enumerate(slots):  # none was written over by those that follow
            assert (slot.view(buffer) == number + 1).all()
    for slots, following in pairwise(buffers):
        assert (
            sum(slot.stop - slot.start for slot in (*slots, following[0])) + 16 * len(slots)
            > max_bytes
        )


@pytest.mark.parametrize(
    "row", [("Tensor", [2]), ("float33", [2]), (None, [2]), ("float32", None), ("float32", [3, -1])]
)
def test_a_bad_dtype_or_shape_is_refused(row):
    with pytest.raises(
        PeerError, match=r"a tensor of dtype .* was announced: expected those of a tensor"
    ):
        list(cut(index_of([("float32", [1]), row]), 100))


@pytest.mark.parametrize(
    ("rows", "tensors", "said"),
    [
        (
            [("float32", [2])],
            [torch.zeros(3)],
            r"torch.float32 of shape \[2\], and its node gave torch.float32 of",
        ),
        (
            [("float32", [2])],
            [torch.zeros(2, dtype=torch.float16)],
            "and its node gave torch.float16",
        ),
        ([("float32", [2])], [], "and its node gave none"),
        ([], [torch.zeros(3)], "0 tensors, and its node gave more"),
    ],
)
def test_tensors_other_than_the_announced_ones_are_not_sent(rows, tensors, said):
    nobody = Broadcast(
        members=("w0", "w1"), group=object(), device="cpu", stop=StopFlag(), max_bytes=100
    )
    with pytest.raises(NodeError, match=f"worker 'w0' announced .*{said}"):
        nobody.send(index_of(rows), iter(tensors), nullcontext)
