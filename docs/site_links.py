"""A hook of mkdocs: puts files outside of docs/ to which pages link into the site, as text."""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
_OUTSIDE = re.compile(r"\]\((?P<up>(?:\.\./)+)(?P<path>[^)#\s]+)(?P<section>#[^)]*)?\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add each linked file to the site."""
    for page in files.documentation_pages():
        for path in _outside(page.content_string, page.src_uri):
            place = _place(path)
            if files.get_file_from_path(place) is None:
                files.append(File.generated(config, place, abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Return the page with its links to such files changed to their places on the site."""

    def link(match: re.Match[str]) -> str:
        path = _path(match, page.file.src_uri)
        if path is None:
            return match[0]
        return f"]({match['up'].removesuffix('../')}{_place(path)})"

    return _OUTSIDE.sub(link, markdown)


def _place(path: str) -> str:
    """Return where a file lies on the site: as text, or mkdocs would leave out what it knows."""
    return f"source/{path}.txt"


def _outside(text: str, page: str) -> set[str]:
    paths = (_path(match, page) for match in _OUTSIDE.finditer(text))
    return {path for path in paths if path is not None}


def _path(match: re.Match[str], page: str) -> str | None:
    """Return the path, from the repository, of a file outside of docs/; None for one within."""
    depth = match["up"].count("../")
    folders = len(PurePosixPath("docs", page).parts) - 1
    if depth < folders or not (ROOT / match["path"]).is_file():
        return None
    return match["path"]
