"""Samples as HTML: whatever a response holds is text and nothing else, and colours are those of
the log-probs.
"""

import html
import re

from hypothesis import given
from hypothesis import strategies as st

from siirl_dask.runs.samples.token_texts import token_pieces
from siirl_dask.views.samples.sample_html import by_logprob, by_ratio, plain_text

TEXTS = st.lists(st.text("<>&\"'a \n\u00e9", max_size=4), max_size=12)
LOGPROBS = st.floats(-1e30, 0) | st.just(float("-inf")) | st.just(float("nan"))
SPAN = re.compile(r'<span title="[^<>"]*" style="(?:background:rgba\([\d,.]+\))?">|</span>')


@given(TEXTS, st.data())
def test_a_response_is_text_and_never_markup(texts, data):
    pieces = [(text, 1) for text in texts]
    before, after = (
        data.draw(st.lists(LOGPROBS, min_size=len(texts), max_size=len(texts))) for _ in range(2)
    )
    shown = [
        by_ratio(pieces, before, after),
        by_logprob(pieces, before),
        plain_text("".join(texts)),
    ]
    for one in shown:
        inside = one.removeprefix('<pre class="siirl-text">').removesuffix("</pre>")
        bare = SPAN.sub("", inside)
        assert "<" not in bare
        assert html.unescape(bare) == "".join(texts)


def test_a_token_is_coloured_by_what_the_trainer_finds_it():
    shown = by_ratio(
        [("same", 1), ("more", 1), ("less", 1)], [-1.0, -2.0, -1.0], [-1.0, -1.0, -3.0]
    )
    same, more, less = re.findall(r'style="([^"]*)"', shown)
    assert same == ""
    assert "214,69,65" in more
    assert "56,120,190" in less
    assert "ratio 2.718" in shown


def test_bytes_of_one_character_stay_together_and_bytes_of_none_do_not_hang():
    tokens = [b"a", b"\xe2", b"\x82", b"\xac", b"\xff", b"b"]

    def decode(ids):
        return b"".join(tokens[one] for one in ids).decode(errors="replace")

    assert token_pieces(range(6), decode) == [("a", 1), ("\u20ac", 3), ("\ufffd", 1), ("b", 1)]
    assert token_pieces([], decode) == []
    pieces = token_pieces(range(4), decode)
    assert "log-prob -4" in by_logprob(pieces, [-1.0, -2.0, -4.0, -3.0])
    assert by_logprob(pieces, [-1.0]).endswith("\u20ac</pre>"), (
        "tokens without a log-prob are plain"
    )
