"""Processes of a user's workers end with their worker, as Dask's own do."""

import atexit
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from distributed import Client, LocalCluster, get_worker

from siirl_dask.worker.process.end import end_with


@contextmanager
def one_worker() -> Iterator[Client]:
    with (
        LocalCluster(n_workers=1, threads_per_worker=1, dashboard_address=None) as cluster,
        Client(cluster) as client,
    ):
        yield client


class LeavesMark:
    """Freed by an interpreter that ends, or never."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.touch = Path.touch

    def __del__(self) -> None:
        self.touch(self.place)


def prepare(folder: Path) -> None:
    worker = get_worker()
    atexit.register((folder / "atexit").touch)
    builtin = __import__("builtins")
    builtin.siirl_dask_mark = LeavesMark(folder / "freed")
    worker.loop.add_callback(end_with, worker)
    worker.loop.add_callback(end_with, worker)


def work_on(folder: Path) -> None:
    def write_late() -> None:
        time.sleep(1.0)
        (folder / "late").touch()

    threading.Thread(target=write_late, daemon=False).start()


def test_a_users_worker_process_calls_what_was_registered_and_frees_no_imports(tmp_path):
    with one_worker() as client:
        client.submit(prepare, tmp_path).result()
    assert (tmp_path / "atexit").exists()
    assert not (tmp_path / "freed").exists(), "an interpreter that ends frees modules, for seconds"


def test_a_thread_that_a_users_task_has_left_behind_ends_its_work(tmp_path):
    with one_worker() as client:
        client.submit(prepare, tmp_path).result()
        client.submit(work_on, tmp_path).result()
    assert (tmp_path / "late").exists()
