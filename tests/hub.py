"""A hub of Hugging Face on loopback: the part of its HTTP API that huggingface_hub reads
repositories through.
"""

from __future__ import annotations

import json
import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

COMMIT = "1" * 40
_API = re.compile(
    r"/api/(datasets|models)/([^/]+/[^/]+)(?:/(revision|tree|paths-info)/([^/]+)(?:/(.*))?)?"
)
_FILE = re.compile(r"/(?:(datasets)/)?([^/]+/[^/]+)/resolve/([^/]+)/(.*)")


@contextmanager
def hub(root: Path) -> Iterator[tuple[str, list[str]]]:
    """Serve ``root/datasets/org/name`` and ``root/models/org/name`` with one revision, ``main``,
    until the block ends.

    Yields the endpoint and the list of the paths of files that were asked for.
    """
    asked: list[str] = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Handler, root, asked))
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", asked
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def __init__(self, root: Path, asked: list[str], *args: object) -> None:
        self._root, self._asked = root, asked
        super().__init__(*args)  # type: ignore[arg-type]

    def log_message(self, *args: object) -> None: ...

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        if match := _FILE.fullmatch(path):
            self._file(match[1] or "models", match[2], match[3], match[4])
        elif match := _API.fullmatch(path):
            self._api(match, [])
        else:
            self._missing("EntryNotFound")

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        match = _API.fullmatch(unquote(urlsplit(self.path).path))
        assert match is not None
        paths = (
            json.loads(body)["paths"]
            if body.startswith("{")
            else re.findall(r"paths=([^&]*)", body)
        )
        self._api(
            match,
            [
                unquote(path.replace("+", " "))
                for path in ([paths] if isinstance(paths, str) else paths)
            ],
        )

    def _api(self, match: re.Match[str], paths: list[str]) -> None:
        kind, name, verb, revision, below = match.groups()
        folder = self._root / kind / name
        below = below or ""
        if not folder.is_dir():
            self._missing("RepoNotFound", 401)
        elif (revision or "main") not in ("main", COMMIT):
            self._missing("RevisionNotFound")
        elif verb == "tree" and not (folder / below).is_dir():
            self._missing("EntryNotFound")
        elif verb == "tree":
            pattern = "**/*" if "recursive=true" in self.path.lower() else "*"
            self._json([_entry(folder, path) for path in sorted((folder / below).glob(pattern))])
        elif verb == "paths-info":
            self._json(
                [_entry(folder, folder / path) for path in paths if (folder / path).exists()]
            )
        else:
            names = [
                path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()
            ]
            self._json(
                {"id": name, "sha": COMMIT, "siblings": [{"rfilename": path} for path in names]}
            )

    def _file(self, kind: str, name: str, revision: str, path: str) -> None:
        file = self._root / kind / name / path
        if revision not in ("main", COMMIT) or not file.is_file():
            self._missing("EntryNotFound")
            return
        self._asked.append(path)
        data = file.read_bytes()
        first, last = 0, len(data) - 1
        if given := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
            first, last = int(given[1]), min(int(given[2] or last), last)
        self.send_response(206 if given else 200)
        self.send_header("ETag", f'"{_digest(file)}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("Accept-Ranges", "bytes")
        if given:
            self.send_header("Content-Range", f"bytes {first}-{last}/{len(data)}")
        self._body(data[first : last + 1])

    def _json(self, document: object) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("X-Repo-Commit", COMMIT)
        self._body(json.dumps(document).encode())

    def _missing(self, code: str, status: int = 404) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self._body(b"{}")

    def _body(self, data: bytes) -> None:
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)


def _entry(folder: Path, path: Path) -> dict[str, object]:
    name = path.relative_to(folder).as_posix()
    if path.is_dir():
        return {"type": "directory", "path": name, "oid": "0" * 40}
    return {"type": "file", "path": name, "oid": _digest(path), "size": path.stat().st_size}


def _digest(path: Path) -> str:
    return f"{abs(hash((path.name, path.stat().st_size, os.fspath(path)))):040x}"[:40]
