"""Files on a web server: what it has, what it does not have, and a server that does not answer."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pyarrow.parquet as pq
import pytest
from siirl_storage import StorageError, TableNotFound, open_table
from siirl_storage.conformance import sample
from siirl_storage.files import check_reached, open_fs


class Handler(SimpleHTTPRequestHandler):
    """Serves a folder, and answers ``/CODE/...`` with that code."""

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        code = self.path.split("/")[1]
        if code.isdecimal():
            self.send_error(int(code))
        else:
            super().do_GET()

    def do_HEAD(self) -> None:
        code = self.path.split("/")[1]
        if code.isdecimal():
            self.send_error(int(code))
        else:
            super().do_HEAD()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(tmp_path))) as served:
        Thread(target=served.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{served.server_port}"
        served.shutdown()


def test_a_file_and_a_folder_of_a_web_server_are_tables(server: str, tmp_path: Path) -> None:
    (tmp_path / "rows").mkdir()
    pq.write_table(sample(0, 3), tmp_path / "rows" / "a.parquet")
    assert open_table(f"{server}/rows/a.parquet").num_rows == 3
    assert open_table(f"{server}/rows").num_rows == 3


def test_what_a_web_server_does_not_have_is_not_there(server: str) -> None:
    for url in (f"{server}/none.parquet", f"{server}/none/", f"{server}/404/a.parquet"):
        with pytest.raises(TableNotFound, match="no table at"):
            open_table(url)


def test_a_web_server_that_does_not_answer_is_no_absent_table() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
        for url in (f"http://127.0.0.1:{port}/a.parquet", f"https://127.0.0.1:{port}/folder/"):
            with pytest.raises(StorageError, match=r"cannot be reached: ClientConnector") as caught:
                open_table(url)
            assert not isinstance(caught.value, TableNotFound)


@pytest.mark.parametrize("code", [401, 403, 451, 500, 503])
def test_a_web_server_that_refuses_is_no_absent_file(server: str, code: int) -> None:
    fs, path = open_fs(f"{server}/{code}/a.parquet")
    with pytest.raises(StorageError, match=f"cannot be reached: ClientResponseError: {code}"):
        check_reached(fs, path)
