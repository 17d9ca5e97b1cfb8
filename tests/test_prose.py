"""Docstrings are sentences: none begins with a word that leaves its subject to be guessed. Pages
avoid words of which a reader has to find the subject.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ("siirl_dask", "storage", "pipelines", "benchmarks", "tests")
REFUSED = re.compile(r"(Of|Those|That|By|What)\b")


def docstrings(module: Path) -> Iterator[tuple[int, str]]:
    """Yield line and text of every string that stands alone in a module, class or function, also
    below a field.
    """
    for scope in ast.walk(ast.parse(module.read_text())):
        if isinstance(scope, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            for statement in scope.body:
                match statement:
                    case ast.Expr(value=ast.Constant(value=str(text))):
                        yield statement.lineno, text.strip()


def test_no_docstring_begins_with_of_those_that_by_or_what():
    modules = [module for folder in FOLDERS for module in sorted((ROOT / folder).rglob("*.py"))]
    assert len(modules) > 300
    refused = [
        f"{module.relative_to(ROOT)}:{line}: {text.splitlines()[0]}"
        for module in modules
        for line, text in docstrings(module)
        if REFUSED.match(text)
    ]
    assert not refused, "write a sentence with a subject and a verb:\n" + "\n".join(refused)


def test_no_page_says_told_or_anew():
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    found = [
        f"{page.relative_to(ROOT)}:{number}"
        for page in pages
        for number, line in enumerate(page.read_text().splitlines(), 1)
        if re.search(r"\b(told|anew)\b", line.replace("told to end;", ""))
    ]
    assert not found, "say who says what to whom, and what happens again:\n" + "\n".join(found)
