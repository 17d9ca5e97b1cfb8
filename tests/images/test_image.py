"""The column of images, in the layouts that datasets have."""

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from siirl_dask.errors import DataError, ImageError
from siirl_dask.images import Image, images_of, normalised
from siirl_dask.images.cache import BoundedCache
from siirl_dask.schema import IMAGES, TYPES

STRUCT = pa.struct({"bytes": pa.binary(), "path": pa.string()})
DATA, PATH = Image(b"abc"), Image(None, "s3://b/a.png")
LAYOUTS = {
    "structs": pa.array(
        [{"bytes": b"abc", "path": "a.png"}, None, {"bytes": None, "path": "s3://b/a.png"}], STRUCT
    ),
    "lists of structs": pa.array(
        [[{"bytes": b"abc", "path": None}], [], [{"bytes": None, "path": "s3://b/a.png"}]],
        pa.list_(STRUCT),
    ),
    "large lists": pa.array(
        [[{"bytes": b"abc"}], None, [{"path": "s3://b/a.png"}]], pa.large_list(STRUCT)
    ),
    "lists of bytes": pa.array([[b"abc"], [], None], pa.list_(pa.binary())),
    "bytes": pa.array([b"abc", None, None], pa.large_binary()),
    "lists of texts": pa.array([None, [], ["s3://b/a.png"]], pa.list_(pa.string())),
    "texts": pa.array([None, None, "s3://b/a.png"]),
    "nothing": pa.nulls(3),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_layout_becomes_a_list_of_bytes_or_path_a_row(layout):
    column = normalised(pa.chunked_array([LAYOUTS[layout]]))
    assert column.type == TYPES[IMAGES]
    column.validate(full=True)
    first, second, third = map(images_of, column.to_pylist())
    assert first in ((DATA,), ())
    assert second == ()
    assert third in ((PATH,), ())
    assert (first, third) != ((), ()) or layout == "nothing"
    assert normalised(column).equals(column), "normalised twice"


ENTRY = st.one_of(
    st.binary(max_size=3).map(lambda data: {"bytes": data, "path": None}),
    st.text(max_size=3).map(lambda path: {"bytes": None, "path": path}),
)


@given(
    rows=st.lists(st.one_of(st.none(), st.lists(ENTRY, max_size=3)), max_size=8),
    cut=st.integers(0, 8),
)
def test_slices_and_chunks_give_the_rows_that_they_have(rows, cut):
    array = pa.array(rows, pa.list_(STRUCT))
    column = normalised(pa.chunked_array([array[:cut], array[cut:]]))
    assert column.to_pylist() == [row or [] for row in rows]


@pytest.mark.parametrize(
    "kind",
    [
        pa.int64(),
        pa.list_(pa.float32()),
        pa.struct({"url": pa.string()}),
        pa.struct({"bytes": pa.string()}),
    ],
    ids=str,
)
def test_a_column_that_holds_no_images_is_refused_by_name(kind):
    with pytest.raises(
        DataError, match=r"column 'pictures' has type .*: expected images as bytes, a URL"
    ):
        normalised(pa.chunked_array([pa.nulls(1, kind)]), "pictures")


@pytest.mark.parametrize("entry", [None, {"bytes": None, "path": None}])
def test_an_entry_without_an_image_is_named_by_its_number(entry):
    with pytest.raises(ImageError, match="image 2 of 2 is null"):
        images_of([{"bytes": b"a", "path": None}, entry])


def test_keys_tell_contents_and_urls_apart():
    same, other = Image(b"abc"), Image(b"abd")
    assert DATA.key == same.key != other.key
    assert len({DATA.key, PATH.key, Image(None, "abc").key}) == 3


@given(sizes=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 12)), max_size=40))
def test_a_cache_never_holds_more_than_it_may_and_gives_what_was_made(sizes):
    cache = BoundedCache(20)
    made = []
    for key, nbytes in sizes:
        value = cache.get(
            (key, nbytes),
            lambda pair=(key, nbytes): made.append(pair) or pair,
            lambda pair: pair[1],
        )
        assert value == (key, nbytes)
        assert cache.nbytes <= 20
    if sum(nbytes for _, nbytes in {*sizes}) <= 20:
        assert len(made) == len({*sizes}), "made again although there was room"


def test_what_was_used_longest_ago_goes_first():
    cache, made = BoundedCache(2), []

    def use(key):
        return cache.get(key, lambda: made.append(key) or key, lambda value: 1)

    for key in "abaca":
        use(key)
    assert made == ["a", "b", "c"]
    use("b")
    assert made[-1] == "b"
