"""Docstrings are sentences: none begins with a word that leaves its subject to be guessed. Pages
avoid words of which a reader has to find the subject.
"""

import ast
import re
from collections.abc import Iterator

import pytest

from tests import parsed
from tests.parsed import ROOT

FOLDERS = ("siirl_dask", "storage", "pipelines", "benchmarks", "tests")
REFUSED = re.compile(r"(Of|Those|That|By|What)\b")
BEGINS = re.compile(rf"""["'](\s|\\[nrt\n])*{REFUSED.pattern}""")
"""A string that begins so, with blanks before it."""


def refused(text: str) -> Iterator[tuple[int, str]]:
    """Yield line and first line of every refused string that stands alone in a module, class or
    function, also below a field.
    """
    if not BEGINS.search(text):
        return  # most files: to parse them all takes seconds
    for scope in ast.walk(ast.parse(text)):
        if isinstance(scope, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            for statement in scope.body:
                match statement:
                    case ast.Expr(value=ast.Constant(value=str(words))):
                        if REFUSED.match(words.strip()):
                            yield statement.lineno, words.strip().splitlines()[0]


def test_no_docstring_begins_with_of_those_that_by_or_what():
    modules = parsed.files_below(*FOLDERS)
    assert len(modules) > 300
    found = [
        f"{module.relative_to(ROOT)}:{line}: {words}"
        for module in modules
        for line, words in refused(parsed.text_of(module))
    ]
    assert not found, "write a sentence with a subject and a verb:\n" + "\n".join(found)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ('"""What a thing is."""', 1),
        ("def f():\n    'That which.'", 1),
        ('class A:\n    a = 1\n    r"""\n    By a field."""', 1),
        ('async def f():\n    """\\\nOf a line that goes on."""', 1),
        ('"""\\n  Those."""', 1),
        ('"" "What is joined."', 1),
        ('"""Whatever it is."""', 0),
        ('a = "What a value is."', 0),
        ('"""The rest. What a thing is."""', 0),
    ],
)
def test_a_docstring_without_a_subject_is_seen(text, count):
    assert len(list(refused(text))) == count


def test_no_page_says_told_or_anew():
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    found = [
        f"{page.relative_to(ROOT)}:{number}"
        for page in pages
        for number, line in enumerate(page.read_text().splitlines(), 1)
        if re.search(r"\b(told|anew)\b", line.replace("told to end;", ""))
    ]
    assert not found, "say who says what to whom, and what happens again:\n" + "\n".join(found)
