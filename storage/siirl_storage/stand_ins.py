"""Texts that are found in the place of a file: the pointer of Git LFS that a clone without it has,
and the page of a web server that has no such file, or asks for a login.
"""

from __future__ import annotations

import re

FIRST_BYTES = 256
"""Bytes of a file by which it is told."""
_LFS = b"version https://git-lfs.github.com/spec/"
_PAGE = re.compile(rb"(\xef\xbb\xbf)?\s*<(!doctype\s+html|html)\b", re.IGNORECASE)


def stand_in(first: bytes) -> str | None:
    """Return in words what a file is that begins with these bytes, and what to do; None for one
    that may be what its name says.
    """
    if first.startswith(_LFS):
        return (
            "it is a pointer of Git LFS in the place of the file: `git lfs pull` in its repository "
            "fetches that"
        )
    if _PAGE.match(first):
        return (
            "it is a web page in the place of the file, as servers send where a file is not there or "
            "needs a login: fetch the file itself"
        )
    return None
