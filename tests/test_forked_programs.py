"""A program that is forked says, does and ends as one that an interpreter runs."""

import os
import signal
import subprocess
import sys

import pytest

from siirl_dask.testing.hosts import Lab, why_no_lab
from tests.forked_programs import ForkedProgram, run_forked

NO_LAB = why_no_lab()
SAYS = """
import json, os, signal, sys
print(json.dumps([sys.argv[1:], os.getcwd(), os.environ.get("SAID"), __name__, os.getsid(0) == os.getpid()]))
print(signal.getsignal(signal.SIGINT) is signal.default_int_handler, signal.getsignal(signal.SIGTERM) == signal.SIG_DFL)
sys.exit(sys.argv[1] if sys.argv[1] == "words" else int(sys.argv[1]))
"""
WAITS = "import time; print('there', flush=True); time.sleep(1000)"
STARTS = """
import multiprocessing, sys
if __name__ == "__main__":
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch"])
    process = context.Process(target=print, args=("torch" in sys.modules,))
    process.start()
    process.join()
    print(process.exitcode, flush=True)
    sys.exit(0)
"""
WHERE = """
import socket, subprocess
found = subprocess.run(["ip", "-4", "-br", "addr", "show", "eth0"], capture_output=True, text=True, check=True)
print(socket.gethostname(), found.stdout.split()[2].partition("/")[0])
"""
LEAVES = "import subprocess; print(subprocess.Popen(['sleep', '1000'], start_new_session=True).pid)"
ENDS = """
import atexit, threading, time
atexit.register(print, "last")
threading.Thread(target=lambda: (time.sleep(0.2), print("thread"))).start()
print("first")
raise ValueError("bad")
"""


@pytest.fixture(autouse=True)
def hears_interrupts():
    """Shells start background jobs, and so perhaps these tests, with SIGINT ignored, which a new
    interpreter takes over.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("status", ["0", "3", "words"])
@pytest.mark.parametrize("way", ["-c", "-m", "file"])
def test_it_has_the_words_folder_environment_and_end_of_an_interpreters(
    way, status, tmp_path, monkeypatch
):
    monkeypatch.setenv("SAID", "this")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    (tmp_path / "says_it.py").write_text(SAYS)
    words = {"-c": ["-c", SAYS], "-m": ["-m", "says_it"], "file": [tmp_path / "says_it.py"]}[way]
    words += [status, "a b", "key=value"]
    forked = run_forked(*words, folder=tmp_path, cwd=tmp_path)
    command = [sys.executable, *map(str, words)]
    expected = subprocess.run(
        command, capture_output=True, text=True, cwd=tmp_path, start_new_session=True
    )
    assert (forked.returncode, forked.stdout) == (expected.returncode, expected.stdout)
    assert forked.stderr == expected.stderr
    assert expected.returncode == (1 if status == "words" else int(status)), expected.stderr


def test_an_error_is_printed_and_threads_and_exit_functions_come_first(tmp_path):
    done = run_forked("-c", ENDS, folder=tmp_path)
    assert done.returncode == 1
    assert done.stdout.splitlines() == ["first", "thread", "last"]
    assert "ValueError: bad" in done.stderr


def test_a_signal_reaches_it_and_is_its_end(tmp_path):
    program = ForkedProgram(["-c", WAITS], None, tmp_path / "output")
    assert program.stdout.readline() == "there\n"
    with pytest.raises(subprocess.TimeoutExpired):
        program.wait(0.1)
    program.send_signal(signal.SIGTERM)
    assert program.wait(60) == -signal.SIGTERM
    assert program.left_over() == []


def test_its_fork_server_is_forked_too_and_has_everything(tmp_path):
    done = run_forked("-c", STARTS, folder=tmp_path)
    assert done.stdout.splitlines() == ["True", "0"], done.stderr


def test_what_it_leaves_is_said(tmp_path):
    program = ForkedProgram(["-c", LEAVES], None, tmp_path / "output", alone=True)
    left = int(program.communicate(60)[0])
    assert program.left_over() == [f"{left} sleep"]
    os.kill(left, signal.SIGKILL)


@pytest.mark.skipif(NO_LAB is not None, reason=str(NO_LAB))
@pytest.mark.parametrize("user", [0, 1000], ids=["root", "a user"])
def test_it_is_on_a_host_of_the_lab_also_of_one_who_is_not_root(user, tmp_path, monkeypatch):
    """A user's lab is in a user namespace."""
    if os.geteuid() == 0:
        monkeypatch.setattr("os.geteuid", lambda: user)
    with Lab(1) as lab:
        program = ForkedProgram(["-c", WHERE], None, tmp_path / "output", host=lab.hosts[0])
        assert program.communicate(60)[0] == f"host0 {lab.hosts[0].address}\n"


def test_workers_need_not_import_what_all_of_them_use(tmp_path):
    """Each import after the fork is paid for by every worker: pandas, half a second, is pyarrow's
    for the first list that it makes an array of.
    """
    needed = ["pandas", "distributed.http.worker.prometheus.core", "siirl_dask.training.policy"]
    code = (
        "import sys; print([name for name in sys.argv[1:] if name not in sys.modules])\n"
        "from siirl_dask.worker.process.report import code_digest\n"
        "print(code_digest.cache_info().currsize)"
    )
    assert run_forked("-c", code, *needed, folder=tmp_path).stdout == "[]\n1\n"
