"""Names in which software sees more than a name, and for each a neighbour that the name matches
as a pattern.
"""

from hypothesis import strategies as st

_PIECES = [
    ("[1]", "1"),
    ("[!x]", "y"),
    ("[[]", "["),
    ("*", "X"),
    ("**", "XX"),
    ("?", "X"),
    ("{a,b}", "a"),
    ("[", "["),
    ("]", "]"),
    ("reward=7", "reward=7"),
    ("step=5", "step=5"),
    ("=", "="),
    (" ", " "),
    ("#", "#"),
    ("%25", "%"),
    ("%2A", "*"),
    ("+", " "),
    ("é", "e\N{COMBINING ACUTE ACCENT}"),
    ("名", "名"),
    ("'", "'"),
    ('"', '"'),
    ("$", "$"),
    ("&", "&"),
    ("a", "a"),
    ("exp", "exp"),
]
"""Each a piece of a name, and the piece of a neighbour's."""


def _joined(pieces):
    return "".join(piece for piece, _ in pieces), "".join(piece for _, piece in pieces)


NEIGHBOURS = (
    st.lists(st.sampled_from(_PIECES), min_size=1, max_size=5)
    .map(_joined)
    .map(lambda pair: (f"r{pair[0]}x", f"r{pair[1]}x"))
    .filter(lambda pair: pair[0] != pair[1])
)
"""Two names; the neighbour is one that the first would match, were it a pattern or an encoded
text."""
