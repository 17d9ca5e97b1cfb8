"""Reads the nodes of a parsed script."""

from __future__ import annotations

from collections.abc import Sequence

from tree_sitter import Node

from siirl_dask.commands.migrate.bash.quoting import first_word

_CLAUSES = ("elif_clause", "else_clause")
_LONGEST_WORD = 2**18


def line_of(node: Node) -> int:
    return int(node.start_point.row) + 1


def text_of(node: Node) -> str:
    assert node.text is not None
    return node.text.decode()


def text_without(node: Node, kinds: Sequence[str]) -> str:
    """Return a node's text without those of its children that are of these kinds."""
    assert node.text is not None
    text = bytearray(node.text)
    for child in node.children:
        if child.type in kinds:
            start = child.start_byte - node.start_byte
            end = child.end_byte - node.start_byte
            text[start:end] = b" " * (end - start)
    return text.decode()


def words_after_target(node: Node) -> str:
    """Return what stands after the file of a redirection: the parser takes the words of the
    command that follow for further files. Empty for any other node.
    """
    targets = [one for one in node.named_children if one.type != "file_descriptor"]
    if node.type != "file_redirect" or len(targets) < 2:
        return ""
    assert node.text is not None
    return node.text[targets[0].end_byte - node.start_byte :].decode()


def value_after(node: Node, target: Node, appends: bool) -> str:
    """Return the word on the right of an assignment, up to its end as bash sees it: the parser
    ends some of them at a ``$``.
    """
    root = node
    while root.parent is not None:
        root = root.parent
    assert root.text is not None
    start = target.end_byte - root.start_byte + (2 if appends else 1)
    rest = root.text[start : start + _LONGEST_WORD].decode(errors="ignore")
    return first_word(rest)


def text_between(node: Node, first: Node, last: Node) -> str:
    """Return what stands from one child of a node up to another."""
    assert node.text is not None
    return node.text[
        first.start_byte - node.start_byte : last.start_byte - node.start_byte
    ].decode()


def branches(node: Node) -> list[tuple[list[Node], list[Node]]]:
    """Return the conditions and the commands of each branch of an ``if``; an ``else`` has no
    condition.
    """
    clauses = [one for one in node.named_children if one.type in _CLAUSES]
    found = []
    for clause in (node, *clauses):
        parts = [one for one in clause.named_children if one.type not in (*_CLAUSES, "comment")]
        starts = [one.start_byte for one in clause.children if one.type == "then"]
        body_start = clause.start_byte
        if starts:
            body_start = starts[0]
        conditions = [one for one in parts if one.start_byte < body_start]
        found.append((conditions, [one for one in parts if one.start_byte >= body_start]))
    return found
