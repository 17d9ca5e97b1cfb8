import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from siirl_dask.datasets.chat_messages import MESSAGES, as_messages


@given(
    chunks=st.lists(st.lists(st.none() | st.text(max_size=5), max_size=5), max_size=3),
    system=st.none() | st.text(max_size=5),
)
def test_each_text_is_a_users_message_after_the_systems_and_a_null_stays_null(chunks, system):
    texts = pa.chunked_array(chunks, pa.string())
    before = [] if system is None else [{"role": "system", "content": system}]
    expected = [
        None if text is None else [*before, {"role": "user", "content": text}]
        for text in texts.to_pylist()
    ]
    made = as_messages(texts, system)
    made.validate(full=True)
    assert made.type == MESSAGES
    assert made.to_pylist() == expected
