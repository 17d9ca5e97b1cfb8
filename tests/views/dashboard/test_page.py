"""The page as a scheduler serves it: it is found, it fills, it says what it cannot read, and
costs no torch.
"""

import asyncio
import logging
import subprocess
import sys
import time
from pathlib import Path

import pytest
from bokeh.client import pull_session
from bokeh.document import Document
from distributed import Client, LocalCluster, Scheduler
from distributed.dashboard.components.scheduler import env
from distributed.dashboard.scheduler import template_variables
from siirl_storage import stage_part

from siirl_dask.observe.trace.trace_table import trace_table
from siirl_dask.trace import Entry, Lane
from siirl_dask.views.dashboard.page import show_page
from siirl_dask.views.dashboard.plugin import NAME, PagePlugin
from siirl_dask.views.dashboard.scheduler_source import SchedulerSource
from siirl_dask.views.dashboard.store import RunStore
from siirl_dask.views.dashboard.style import TEMPLATE
from tests.commands.test_pictures import written
from tests.images.pictures import png
from tests.runs.test_questions import NASTY, row, save
from tests.runs.test_trace import put
from tests.views.dashboard.test_store import about, step


class Viewer:
    """A document of the page, which looks when it is told to."""

    def __init__(self, store, scheduler):
        self.document = Document()
        source = SchedulerSource(scheduler, store)
        show_page(source, env.from_string(TEMPLATE), {}, self.document)
        (callback,) = self.document.session_callbacks
        self.look = callback.callback

    def named(self, name):
        return self.document.select_one({"name": name})

    def wait_until(self, ready, seconds=30.0):
        deadline = time.monotonic() + seconds
        while not ready():
            assert time.monotonic() < deadline, self.named("state").text
            time.sleep(0.02)
            self.look()


@pytest.fixture(scope="module")
def client():
    """A scheduler that has been up for a while when the page comes, and no workers."""
    options = {
        "dashboard_address": "127.0.0.1:0",
        "host": "127.0.0.1",
        "silence_logs": logging.CRITICAL,
    }
    with LocalCluster(n_workers=0, **options) as cluster, Client(cluster) as client:
        client.register_plugin(PagePlugin())
        client.register_plugin(PagePlugin())  # each run does
        yield client


@pytest.fixture
def scheduler(client):
    return client.cluster.scheduler


@pytest.fixture
def url(tmp_path):
    """The folder of a run of two steps on two workers."""
    url = save(
        tmp_path / "it",
        {at: [row(at, one, one % 2, 3, text=NASTY) for one in range(6)] for at in (1, 2)},
    )
    for at in (1, 2):
        for worker in (0, 1):
            put(url, at, worker, seconds=3.0 if worker else 1.0)
    return url


@pytest.fixture
def store(url):
    """The run as a scheduler knows it."""
    store = RunStore()
    store.begin(about(url, members={"0": "tcp://a:1", "1": "tcp://a:2"}, steps=9))
    for at in (1, 2):
        store.record(url, step(at, **{"policy/entropy": 0.3, "seconds/rollout": 1.0}))
    return store


def test_curves_timeline_samples_and_the_slowest_come_from_records_and_the_run_s_tables(
    store, scheduler
):
    viewer = Viewer(store, scheduler)
    sources = [viewer.named(name) for name in ("curve reward", "timeline bars", "sample rows")]
    viewer.wait_until(lambda: all(len(next(iter(source.data.values()))) for source in sources))
    assert list(viewer.named("curve reward").data["x"]) == [1, 2]
    assert set(viewer.named("timeline bars").data["name"]) == {"rollout"}
    assert list(viewer.named("sample rows").data["step"]) == [2] * 6 + [1] * 6
    state = viewer.named("state").text
    assert "step 2 of 9" in state
    assert "node <b>rollout</b> on worker <b>1</b>" in state


def test_a_click_shows_the_whole_sample_escaped(store, scheduler):
    viewer = Viewer(store, scheduler)
    rows, text = viewer.named("sample rows"), viewer.named("sample")
    viewer.wait_until(lambda: len(rows.data["step"]))
    rows.selected.indices = [3]
    viewer.wait_until(lambda: "question" in text.text)
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in text.text
    assert "<script" not in text.text


def test_a_click_shows_the_images_of_that_prompt_alone_and_not_too_many(scheduler, tmp_path):
    url = written(tmp_path, [[png(seed=1)], [*[png(9, 5)] * 13, b"no image"]], "images.most=20")
    store = RunStore()
    store.begin(about(url))
    store.record(url, step(3))
    viewer = Viewer(store, scheduler)
    rows, text = viewer.named("sample rows"), viewer.named("sample")
    viewer.wait_until(lambda: len(rows.data["step"]))
    rows.selected.indices = [rows.data["prompt"].index("Count: 0")]
    viewer.wait_until(lambda: "<img" in text.text)
    assert text.text.count('src="data:image/') == 1
    assert "16x24 PNG" in text.text
    rows.selected.indices = [rows.data["prompt"].index("Count: 2")]
    viewer.wait_until(lambda: "5x9 PNG" in text.text or "9x5 PNG" in text.text)
    assert text.text.count('src="data:image/') == 12
    assert "2 more images are left out (12 are shown)" in text.text


def test_a_step_is_on_the_page_at_the_next_look_and_its_tables_when_they_are_there(
    store, scheduler, url
):
    viewer = Viewer(store, scheduler)
    viewer.wait_until(lambda: len(viewer.named("sample rows").data["step"]))
    store.record(url, step(3))
    viewer.look()
    assert list(viewer.named("curve reward").data["x"]) == [1, 2, 3]
    wait = Entry(Lane.WAIT, "rows", "a->b", False, "train", 3, 30 * 10**9, 10**9, None)
    stage_part(f"{url}/trace/step=000003", 1, 0, trace_table([wait], "0", "boot", 0))
    data = viewer.named("timeline bars")
    viewer.wait_until(lambda: "waits:" in data.data["kind"])
    hatches = {
        hatch
        for hatch, kind in zip(data.data["hatch"], data.data["kind"], strict=True)
        if kind == "waits:"
    }
    assert hatches == {"right_diagonal_line"}


def test_what_cannot_be_read_is_said_on_the_page_and_nowhere_else(store, scheduler, url, caplog):
    Path(f"{url}/trace/step=000002/part-0001-00000.parquet").write_bytes(b"no parquet")
    viewer = Viewer(store, scheduler)
    viewer.wait_until(lambda: "cannot be read" in viewer.named("timeline remark").text)
    store.begin(about("s3nosuch://nowhere/run"))
    store.record("s3nosuch://nowhere/run", step(1))
    viewer.wait_until(lambda: "s3nosuch" in viewer.named("samples remark").text)
    assert len(viewer.named("curve reward").data["x"]) == 1, (
        "what the driver tells is there in any case"
    )
    assert not [one for one in caplog.records if one.levelno >= logging.WARNING]


def call(client, operation, **arguments):
    async def told():
        return await getattr(client.scheduler, f"{NAME}-{operation}")(**arguments)

    return client.sync(told)


def test_a_scheduler_that_is_up_serves_the_page_with_links_to_and_from_dask_s_own(client, url):
    """Holds Dask's internals to what ``add_page`` takes them for."""
    assert call(client, "begin", about=about(url))
    call(client, "record", url=url, record=step(1))
    address = client.dashboard_link.removesuffix("/status") + "/siirl"
    reader = client.cluster.scheduler.plugins[NAME].store.reader
    assert not [key for key in reader._held if url in key], "nobody looks, and nothing is read"
    with pull_session(url=address) as session:
        assert list(session.document.select_one({"name": "curve reward"}).data["x"]) == [1]
    assert template_variables(client.cluster.scheduler)["pages"].count("siirl") == 1


def test_a_scheduler_without_a_dashboard_has_no_page_and_takes_the_calls():
    async def without():
        async with Scheduler(port=0, dashboard=False, host="127.0.0.1") as scheduler:
            plugin = PagePlugin()
            await scheduler.register_scheduler_plugin(plugin, idempotent=True)
            assert not plugin.begin(about("a"))
            plugin.record("a", step(1))
            plugin.log_event("siirl-a", {"kind": "done"})
            assert not plugin.store.runs

    asyncio.run(without())


PRELOADED = """
import asyncio, sys
from urllib.request import urlopen
from distributed import Scheduler

async def main():
    preload = "siirl_dask.views.dashboard"
    async with Scheduler(port=0, host="127.0.0.1", dashboard_address="127.0.0.1:0", preload=[preload]) as scheduler:
        url = f"http://127.0.0.1:{scheduler.http_server.port}/siirl"
        text = (await asyncio.to_thread(lambda: urlopen(url, timeout=20).read())).decode()
        assert "siirl-card" in text, text[:500]
    print([name for name in ("torch", "transformers", "vllm") if name in sys.modules])

asyncio.run(main())
"""


@pytest.mark.slow
def test_a_scheduler_that_preloads_it_serves_the_page_without_torch():
    done = subprocess.run(
        [sys.executable, "-c", PRELOADED], capture_output=True, text=True, timeout=100
    )
    assert done.stdout.strip() == "[]", done.stderr
    assert "Traceback" not in done.stderr


def test_the_end_of_a_run_is_on_the_page_and_what_to_type_after_it(client, scheduler, url):
    assert call(client, "begin", about=about(url, steps=9))
    call(client, "record", url=url, record=step(1))
    store = scheduler.plugins[NAME].store
    viewer = Viewer(store, scheduler)
    assert "it has not said" in viewer.named("state").text
    failed = {"status": "failed", "error": "<b>it broke", "resume": "siirl-dask run c.yaml"}
    began = time.monotonic()
    call(client, "end", url=url, about=failed)
    assert time.monotonic() - began > 3, "a browser that looks on has time to get it"
    viewer.look()
    farewell = viewer.named("farewell").text
    for told in ("has ended: failed", "step 1 of 9", f"siirl-dask serve {url}", failed["resume"]):
        assert told in farewell, told
    assert "&lt;b&gt;it broke" in viewer.named("state").text
    call(client, "end", url=url, about={"status": "<script>"})
    assert store.runs[url].ended.status == "failed"


def test_a_run_that_nobody_looks_at_ends_without_waiting_for_a_browser(url):
    plugin = PagePlugin()
    plugin.store = (
        RunStore()
    )  # its own: a document of another test goes on looking at the shared one
    plugin.store.begin(about(url, steps=9))
    ending = plugin.end(url, {"status": "failed", "error": "it broke"})
    with pytest.raises(StopIteration):  # it has returned at its first step: it waited for nothing
        ending.send(None)
    assert plugin.store.runs[url].ended.status == "failed"
