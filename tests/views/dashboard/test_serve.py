"""``siirl-dask serve``: the page of a run from its folder alone, and a list to compare from."""

import json
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from http.client import HTTPConnection
from pathlib import Path
from typing import ClassVar
from urllib.parse import urlsplit
from uuid import uuid4

import fsspec
import pytest
from bokeh.document import Document
from fsspec.implementations.memory import MemoryFileSystem
from tornado.ioloop import IOLoop

from siirl_dask.errors import ConfigError, DataError
from siirl_dask.observe import RunFailure, Status
from siirl_dask.runs.attempt import take
from siirl_dask.views.dashboard.page import show_page
from siirl_dask.views.dashboard.reader import Reader
from siirl_dask.views.dashboard.served import store_threads
from siirl_dask.views.dashboard.served.folder_source import FolderSource, Looks
from siirl_dask.views.dashboard.served.server import RunServer, served_runs
from tests.written_runs import (
    begin_run,
    end_run,
    start_run,
    train_record,
    validation_record,
    whole_run,
    write_metrics,
)

HOSTILE = "<script>alert(1)</script>"


def shown(url, empty="0 of 0"):
    """The texts of a page that has been shown all there is of the run at ``url``; ``empty`` is a
    part of one that has been shown nothing.
    """
    looks = Looks()
    document = Document()
    show_page(FolderSource(looks, str(url), "it"), "", {}, document)
    (callback,) = document.session_callbacks
    deadline = time.monotonic() + 20
    named = document.select_one({"name": "state"})
    while not looks.reader.known(("look", str(url))).version or empty in named.text:
        assert time.monotonic() < deadline, named.text
        time.sleep(0.05)
        callback.callback()
    looks.reader.close()
    return named.text, document.select_one({"name": "farewell"}).text


def test_a_run_that_is_over_is_shown_from_its_folder_in_any_store(store_url):
    url = whole_run(f"{store_url}/run", traced=1)
    state, farewell = shown(url)
    for told in ("complete", "step 10 of 60", "reward", "node <b>", "validation"):
        assert told in state, told
    assert "training</span>" not in state
    assert "has ended: complete" in farewell
    assert f"siirl-dask serve {url}" in farewell


def test_a_run_that_failed_says_why_and_what_to_type_and_runs_no_text_of_its_own(tmp_path):
    url = begin_run(tmp_path / "run")
    start_run(url, beat=b"ended\n")
    failure = RunFailure(kind="NodeError", message=HOSTILE, resume=f"siirl-dask run {HOSTILE}")
    end_run(url, status=Status.FAILED, error=HOSTILE, failure=failure)
    for text in shown(url):
        assert "lost the run" not in text
        assert "failed" in text
        assert "siirl-dask run &lt;script&gt;" in text
        assert "<script" not in text


def test_a_run_whose_process_is_gone_without_a_word_is_not_shown_as_training(tmp_path):
    url = begin_run(tmp_path / "run")
    start_run(url, beat=b"ended\n")
    state, farewell = shown(url)
    assert "gone" in state
    assert "training</span>" not in state + farewell


def test_a_page_whose_server_was_stopped_says_so_and_not_that_the_run_was_lost(tmp_path):
    url = begin_run(tmp_path / "run")
    with take(str(url), 30.0, print):
        state, farewell = shown(url)
    assert "training</span>" in state
    assert "The server of this page has ended" in farewell
    assert f"siirl-dask serve {url}" in farewell
    assert "lost the run" not in farewell
    assert "has ended:" not in farewell


@pytest.fixture
def folder(tmp_path):
    """A folder of two runs, with something else in it."""
    for name in ("one", "two"):
        whole_run(tmp_path / "runs" / name, traced=1)
    (tmp_path / "runs" / "data").mkdir()
    (tmp_path / "secret").mkdir()
    begin_run(tmp_path / "secret" / "run")
    return tmp_path / "runs"


@pytest.fixture
def server(folder):
    """A server of that folder: what to ask, and the answer."""
    with serving(served_runs(str(folder))) as ask:
        yield ask


@contextmanager
def serving(runs):
    """Serve runs on a thread of its own; yield what to ask."""
    ready = threading.Event()
    held = {}

    def serve():
        held["server"] = server = RunServer(runs, "127.0.0.1", 0)
        held["loop"] = IOLoop.current()
        held["loop"].add_callback(ready.set)
        server.serve()

    thread = threading.Thread(target=serve)
    thread.start()
    assert ready.wait(20)
    port = urlsplit(held["server"].address).port

    def ask(path, **headers):
        connection = HTTPConnection("127.0.0.1", port, timeout=30)
        connection.request("GET", path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()

    yield ask
    held["loop"].add_callback(held["loop"].stop)
    thread.join(20)


class SlowStore(MemoryFileSystem):
    """A store whose folders are listed when the test lets them be."""

    protocol = "slow"
    store: ClassVar = {}
    pseudo_dirs: ClassVar = [""]
    may_list = threading.Event()
    asked = threading.Semaphore(0)

    def ls(self, path, detail=True, **options):
        self.asked.release()
        assert self.may_list.wait(60)
        return super().ls(path, detail=detail, **options)


@pytest.fixture
def slow():
    """A folder of one run in a store that does not answer any more."""
    fsspec.register_implementation("slow", SlowStore, clobber=True)
    SlowStore.may_list.set()
    url = f"slow://{uuid4().hex}/runs"
    whole_run(f"{url}/one")
    runs = served_runs(url)
    SlowStore.may_list.clear()
    while SlowStore.asked.acquire(blocking=False):
        pass
    yield runs
    SlowStore.may_list.set()


@pytest.mark.parametrize("page", ["/", "/run?name=one", "/compare?name=one"])
def test_other_pages_answer_while_a_store_does_not(page, slow):
    with serving(slow) as ask, ThreadPoolExecutor(1) as viewers:
        waiting = viewers.submit(ask, page)
        assert SlowStore.asked.acquire(timeout=20)
        assert ask("/compare")[0] == 400
        assert ask("/static/js/bokeh.min.js")[0] == 200
        assert not waiting.done()
        SlowStore.may_list.set()
        assert waiting.result(60)[0] == 200


def test_a_viewer_of_a_store_that_does_not_answer_is_told_and_asks_it_no_second_time(
    slow, monkeypatch
):
    monkeypatch.setattr(store_threads, "PATIENCE", 0.3)
    with serving(slow) as ask:
        for page in ("/", "/", "/run?name=one"):
            status, text = ask(page)
            assert status == 502
            assert "has not answered for 0.3 s" in text or page != "/"
        assert SlowStore.asked.acquire(timeout=20)
        assert SlowStore.asked.acquire(timeout=20)
        assert not SlowStore.asked.acquire(blocking=False), "one thread for each question"
        names = [f"/run?name={number}" for number in range(20)]
        assert {ask(name)[0] for name in names} == {502}
        threads = [one for one in threading.enumerate() if one.name == "siirl-list"]
        assert len(threads) <= 8
        SlowStore.may_list.set()
        for thread in threads:
            thread.join(20)
        assert ask("/")[0] == 200


def test_a_folder_of_runs_is_a_list_with_a_page_each_and_a_comparison(server):
    status, text = server("/")
    assert status == 200
    for told in ("run?name=one", "run?name=two", "complete"):
        assert told in text
    assert "data" not in text.partition("<body>")[2].replace("data:", "")
    status, text = server("/run?name=one")
    assert status == 200
    assert 'id="siirl-farewell"' in text
    status, text = server("/compare?name=one&name=two")
    assert status == 200
    assert "where the runs differ" in text


def test_a_run_under_way_is_in_the_list_with_its_step_and_newest_validation(server, folder):
    """Its cells were empty until it ended."""
    url = begin_run(folder / "three")
    write_metrics(
        url,
        [
            validation_record(0, 0.25),
            train_record(1),
            train_record(2),
            validation_record(2, 0.75),
            train_record(3),
        ],
    )
    with take(url, 30.0, print):
        status, text = server("/")
    assert status == 200
    (line,) = [row for row in text.split("<tr>") if "run?name=three" in row]
    assert "under way" in line
    assert "<td>3</td><td>0.75</td>" in line


@pytest.mark.parametrize(
    "path", ["/run", "/run?name=three", "/run?name=../secret/run", "/compare?name=../secret/run"]
)
def test_what_is_not_in_the_folder_is_not_served(server, path):
    status, text = server(path)
    assert status == 404
    assert "secret" not in text


def test_other_sites_and_other_names_of_this_machine_get_nothing(server):
    assert server("/", Host="evil.example.com:80")[0] == 403
    assert server("/run?name=one", Origin="http://evil.example.com")[0] == 403
    assert server("/", Host="localhost:80")[0] == 200
    assert server("/", Host="192.0.2.7:80")[0] == 200  # an address, which no site can point here


def test_a_run_with_a_damaged_summary_is_a_line_of_the_list_and_not_its_end(server, folder):
    summary = json.loads((folder / "one" / "summary.json").read_text())
    for damage in ({"steps": "three"}, {"seconds": None}, {"validation": {"first": "<b>"}}):
        (folder / "one" / "summary.json").write_text(json.dumps(summary | damage))
        status, text = server("/")
        assert status == 200
        assert "run?name=one" in text
        assert "<b>" not in text


def test_a_run_that_cannot_be_read_says_why_on_its_page(tmp_path, monkeypatch):
    def look(looks, url):
        raise DataError(f"line 3 of {url} is damaged {HOSTILE}")

    monkeypatch.setattr(Looks, "look", look)
    state, _ = shown(whole_run(tmp_path / "run"), empty="has not said")
    assert "unreadable" in state
    assert "is damaged &lt;script&gt;" in state


def test_code_beside_a_run_does_not_run_when_it_is_looked_at(tmp_path):
    url = whole_run(tmp_path / "run")
    for module in ("bokeh", "pyarrow", "duckdb"):
        (tmp_path / "run" / f"{module}.py").write_text("open('ran', 'w')\n")
    program = "from siirl_dask.cli import main; import sys; sys.path.pop(0); main(['report', '.'])"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=url, timeout=100
    )
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "run" / "ran").exists()


def test_answers_that_viewers_ask_for_are_not_read_again_at_each_look():
    reader = Reader(64)
    reads = []
    for _ in range(10):
        for key in range(40):
            reader.get(key, partial(reads.append, key), soon=60.0)
        time.sleep(0.02)
    reader.close()
    assert len(reads) == len(set(reads))


def test_a_folder_without_a_run_is_refused_before_anything_listens(tmp_path):
    for url in (tmp_path, tmp_path / "nothing"):
        with pytest.raises(ConfigError, match="holds no run"):
            served_runs(str(url))


IMPORTS = """
import json, sys
from siirl_dask.views.dashboard.served import server
print(json.dumps([name for name in ("distributed", "torch", "dask") if name in sys.modules]))
"""


def test_serving_needs_no_cluster_and_no_torch():
    done = subprocess.run(
        [sys.executable, "-c", IMPORTS], capture_output=True, text=True, cwd=Path.cwd(), check=True
    )
    assert json.loads(done.stdout) == []
