import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from siirl_dask.coordinator.transport.messages import check_types, from_frames, to_frames
from siirl_dask.errors import DataError, PeerError

MESSAGES = pa.list_(pa.struct({"role": pa.string(), "content": pa.string()}))
SCHEMA = pa.schema(
    {
        "row_id": pa.int64(),
        "ids": pa.list_(pa.int32()),
        "nested": pa.list_(pa.list_(pa.float32())),
        "text": pa.string(),
        "flag": pa.bool_(),
        "messages": MESSAGES,
        "blob": pa.large_binary(),
        "pair": pa.list_(pa.float64(), 2),
        "parts": pa.map_(pa.string(), pa.float32()),
        "nothing": pa.null(),
    }
)
maybe = lambda strategy: st.none() | strategy  # noqa: E731
text = st.text(max_size=5)
floats = st.floats(width=32, allow_nan=False)
rows = st.fixed_dictionaries(
    {
        "row_id": st.integers(0, 2**40),
        "ids": maybe(st.lists(st.integers(0, 1000), max_size=4)),
        "nested": st.lists(maybe(st.lists(floats, max_size=2)), max_size=2),
        "text": maybe(text),
        "flag": maybe(st.booleans()),
        "messages": maybe(
            st.lists(st.fixed_dictionaries({"role": maybe(text), "content": text}), max_size=2)
        ),
        "blob": maybe(st.binary(max_size=5)),
        "pair": maybe(st.lists(floats, min_size=2, max_size=2)),
        "parts": maybe(
            st.dictionaries(text, maybe(floats), max_size=2).map(lambda parts: [*parts.items()])
        ),
        "nothing": st.none(),
    }
)
tables = st.lists(rows, max_size=6).map(lambda items: pa.Table.from_pylist(items, schema=SCHEMA))


def received(frames):
    return [bytes(frame) for frame in frames]


@given(tables, st.integers(0, 5), st.integers(0, 6))
def test_a_table_or_a_slice_of_one_comes_back_equal(table, start, length):
    part = table.slice(start, length)
    header, frames = to_frames(part)
    back = from_frames(header, received(frames), SCHEMA)
    back.validate(full=True)
    assert back.equals(part)


def test_a_slice_does_not_ship_its_parent():
    table = pa.table({"ids": pa.array([[1] * 1000] * 1000, pa.list_(pa.int32()))})
    _, frames = to_frames(table.slice(10, 2))
    assert sum(map(len, received(frames))) < 20_000


def test_buffers_of_a_whole_table_are_not_copied():
    column = pa.array([1, 2, 3], pa.int64())
    _, frames = to_frames(pa.table({"a": column}))
    assert any(pa.py_buffer(frame).address == column.buffers()[1].address for frame in frames)


@settings(max_examples=300)
@given(tables, st.data())
def test_damaged_frames_are_refused_or_give_a_valid_table(table, data):
    header, frames = to_frames(table)
    frames = received(frames)
    nodes = [list(node) for node in header["nodes"]]
    match data.draw(st.sampled_from(["cut", "flip", "node", "rows", "drop", "swap"])):
        case "cut" if frames:
            victim = data.draw(st.integers(0, len(frames) - 1))
            frames[victim] = frames[victim][: data.draw(st.integers(0, len(frames[victim])))]
        case "flip" if any(frames):
            victim = data.draw(st.sampled_from([i for i, frame in enumerate(frames) if frame]))
            place = data.draw(st.integers(0, len(frames[victim]) - 1))
            damaged = bytearray(frames[victim])
            damaged[place] ^= data.draw(st.integers(1, 255))
            frames[victim] = bytes(damaged)
        case "node":
            node = data.draw(st.sampled_from(nodes))
            node[data.draw(st.integers(0, len(node) - 1))] = data.draw(
                st.integers(-(2**63), 2**63 - 1) | st.none()
            )
        case "rows":
            header = {**header, "rows": data.draw(st.integers(-5, 10))}
        case "drop":
            nodes = nodes[:-1]
        case "swap":
            nodes.reverse()
    try:
        back = from_frames({**header, "nodes": nodes}, frames, SCHEMA)
    except PeerError:
        return
    back.validate(full=True)
    back.to_pylist()


@pytest.mark.parametrize(
    "header", [{}, {"rows": 1}, {"nodes": 7, "rows": 1}, {"rows": 0, "nodes": [[0]]}, None, "x"]
)
def test_a_malformed_header_is_refused(header):
    with pytest.raises(PeerError):
        from_frames(header, [], SCHEMA)


def test_a_type_that_cannot_move_is_named():
    schema = pa.schema({"ok": MESSAGES, "label": pa.dictionary(pa.int32(), pa.string())})
    with pytest.raises(DataError, match=r"'label'.*dictionary.*cast"):
        check_types(schema)
