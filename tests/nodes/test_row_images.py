"""Images of a table's rows: once for the rows that show the same ones."""

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from siirl_dask.images import Image
from siirl_dask.nodes.packed_table import pack_rows
from siirl_dask.nodes.row_images import row_images
from siirl_dask.schema import GROUP_ID, IMAGES, OBSERVED_IMAGES, PROMPT_IDS, RESPONSE_IDS, TYPES

ONE, OTHER = {"bytes": b"one", "path": None}, {"bytes": b"other", "path": None}
URL = {"bytes": None, "path": "s3://pictures/1.png"}


def table(images, groups, **more):
    ids = [[1]] * len(images)
    columns = {GROUP_ID: groups, PROMPT_IDS: ids, RESPONSE_IDS: ids, IMAGES: images, **more}
    return pa.table({name: pa.array(values, TYPES[name]) for name, values in columns.items()})


def test_rows_of_a_group_have_their_images_once():
    rows = table([[ONE]] * 3 + [[ONE, URL]] * 2 + [[], None], [7, 7, 7, 9, 9, 3, 4])
    found = row_images(rows)
    one, url = Image(b"one"), Image(None, URL["path"])
    assert found.groups == [(one,), (one, url), (), ()]
    assert found.of_row.tolist() == [0, 0, 0, 1, 1, 2, 3]


def test_rows_of_a_group_that_show_other_images_keep_their_own():
    """As the turns of an episode do, each of which shows one more screenshot."""
    found = row_images(table([[ONE], [ONE, OTHER], [ONE]], [7, 7, 7]))
    assert [found.groups[number] for number in found.of_row.tolist()] == [
        (Image(b"one"),),
        (Image(b"one"), Image(b"other")),
        (Image(b"one"),),
    ]
    assert found.of_row.tolist() == [0, 1, 0]


def test_chunks_are_read_where_they_are():
    parts = [table([[ONE]], [7]), table([[ONE]], [7]), table([[OTHER]], [8])]
    found = row_images(pa.concat_tables(parts))
    assert found.of_row.tolist() == [0, 0, 1]


def test_a_table_without_images_has_none():
    rows = table([[ONE]], [7]).drop_columns([IMAGES])
    assert row_images(rows) is None
    assert pack_rows(rows).rows.images is None
    assert pack_rows(table([[ONE]], [7])).rows.images.groups == [(Image(b"one"),)]


OBSERVED = st.lists(
    st.tuples(st.integers(0, 1), st.sampled_from([b"one", b"other"])), max_size=2, unique=True
).map(sorted)
"""Images of the environment at tokens of a row; the prompt is token 0."""


@given(
    st.lists(
        st.tuples(
            st.integers(0, 1), st.sampled_from([None, [], [ONE], [OTHER], [ONE, OTHER]]), OBSERVED
        ),
        max_size=8,
    )
)
def test_rows_have_one_number_where_their_prompts_show_the_same_and_only_there(rows):
    """Rows with one number share the layout of their prompt."""
    groups, images, observed = [[row[at] for row in rows] for at in range(3)]
    shown = [[{"start": start, "bytes": data} for start, data in row] for row in observed]
    found = row_images(table(images, groups, **{OBSERVED_IMAGES: shown}))
    if not rows:
        assert found is None or not len(found.of_row)
        return
    prompts = [
        (group, repr(own), tuple(one for one in row if one[0] == 0)) for group, own, row in rows
    ]
    numbers = found.of_row.tolist()
    order = list(dict.fromkeys(prompts))
    assert numbers == [order.index(prompt) for prompt in prompts]
    for number, own in zip(numbers, images, strict=True):
        expected = [Image(one["bytes"]) for one in own or []]
        assert list(found.groups[number]) == expected
