"""code_execution rewards a model's code by the tests it passes, and the code can do no harm."""

import contextlib
import ctypes
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial

import psutil
import pytest

from siirl_dask.config import RewardsConfig
from siirl_dask.context import Device, Rank
from siirl_dask.rewards import build_scorer, code_execution
from siirl_dask.rewards.code_execution.sandbox import SandboxLimits, output, passes, passes_together

PR_SET_CHILD_SUBREAPER = 36  # prctl(2)
pytestmark = pytest.mark.usefixtures("isolation")


QUICK = SandboxLimits(seconds=5.0)
DOUBLE = "```python\ndef double(x):\n    return 2 * x\n```"
ECHO = "```python\nfor _ in range(int(input())):\n    print(input().upper() + ' ')\n```"


@pytest.mark.parametrize(
    ("answer", "share"),
    [
        ("assert double(2) == 4", 1.0),
        ("assert double(2) == 5", 0.0),
        (
            [
                "assert double(2) == 4",
                "assert double(3) == 7",
                "assert double(4) == 8",
                "raise SystemExit",
            ],
            0.5,
        ),
        (json.dumps(["assert double(2) == 4", "assert double(3) == 7"]), 0.5),
    ],
)
def test_the_reward_is_the_share_of_passed_tests(answer, share):
    assert code_execution("p", DOUBLE, answer) == share


@pytest.mark.parametrize("as_json", [False, True])
def test_programs_are_compared_by_their_output(as_json):
    tests = [
        {"input": "2\na\né\n", "output": "A\nÉ"},
        {"input": "1\na\n", "output": "A\n\n"},
        {"input": "1\na\n", "output": " A"},
        {"input": "2\na\n", "output": "A"},  # it runs out of input, and fails
    ]
    assert code_execution("p", ECHO, json.dumps(tests) if as_json else tests) == 0.5


def test_input_of_any_size_reaches_the_program():
    assert output("import sys; print(len(sys.stdin.read()))", "x" * 3_000_000, QUICK) == "3000000\n"


@pytest.mark.parametrize(
    ("response", "share"),
    [
        ("first\n```python\ndouble = str\n```\nbetter\n" + DOUBLE, 1.0),
        ("```\ndouble = lambda x: 2 * x\n```", 1.0),
        ("```Python3 \r\ndouble = lambda x: 2 * x\n```", 1.0),
        ("```python\ndouble = lambda x: 2 * x", 0.0),
        ("def double(x): return 2 * x", 0.0),
        ("```python\ndef double(x) return\n```", 0.0),
        ("```python\n```", 0.0),
    ],
)
def test_the_last_code_block_runs(response, share):
    assert code_execution("p", response, "assert double(2) == 4") == share


@pytest.mark.parametrize(
    "code", ["import sys; sys.exit(0)", "import os; os._exit(0)", "raise SystemExit", "exit()"]
)
def test_a_program_that_exits_before_the_test_does_not_pass(code):
    assert not passes(code, "assert False", QUICK)


def test_programs_can_define_dataclasses_and_check_for_main():
    code = """
from __future__ import annotations
from dataclasses import dataclass
@dataclass
class P:
    x: int
if __name__ == "__main__":
    print("main")
"""
    assert passes(code, "assert P(1).x == 1 and P(1) != P(2)", QUICK)
    assert passes_together(code, "assert P(1) == P(1)", QUICK)
    assert output(code, "", QUICK) == "main\n"


@pytest.mark.parametrize("answer", ["", " ", [], [""], None, [{"input": "1"}], [3], "[]"])
def test_answers_without_tests_are_refused(answer):
    with pytest.raises(ValueError, match="answer holds"):
        code_execution("p", DOUBLE, answer)


@pytest.mark.parametrize(
    "code",
    ["while True: pass", "import time; time.sleep(60)", "import threading; exec('while 1: 1')"],
)
def test_an_endless_program_is_stopped_and_ends_the_tests_after_it(code):
    began = time.monotonic()
    assert code_execution("p", f"```python\n{code}\n```", ["1"] * 50, seconds=1.0) == 0.0
    assert time.monotonic() - began < 10


def test_a_program_that_takes_too_much_memory_fails():
    hog = "def found(): return not any(bytearray(2**28)[:9])"
    assert not passes(hog, "assert found()", replace(QUICK, memory=2**27))
    assert passes(hog, "assert found()", replace(QUICK, memory=2**32))


@pytest.mark.parametrize("isolate", [True, False])
@pytest.mark.parametrize(
    "start",
    [
        "os.fork()",
        "subprocess.run(['true'])",
        "os.posix_spawn('/bin/true', ['true'], {})",
        "multiprocessing.get_context('fork').Process().start()",
    ],
)
def test_no_process_can_be_started(isolate, start):
    code = f"""
import multiprocessing, os, subprocess
try:
    {start}
    print("started")
except PermissionError:
    print("refused")
"""
    assert output(code, "", replace(QUICK, isolate=isolate)) == "refused\n"


def test_threads_can_be_started():
    code = "import threading; t = threading.Thread(target=print, args=('hi',)); t.start(); t.join()"
    assert output(code, "", QUICK) == "hi\n"


@pytest.mark.parametrize("isolate", [True, False])
def test_the_network_is_out_of_reach_unless_isolation_is_off(isolate):
    with socket.create_server(("127.0.0.1", 0)) as server:
        code = (
            f"import socket; socket.create_connection(('127.0.0.1', {server.getsockname()[1]}), "
            "2); print('in')"
        )
        printed = output(code, "", replace(QUICK, isolate=isolate))
        server.settimeout(0.2)
        seen = False
        with contextlib.suppress(TimeoutError):
            server.accept()[0].close()
            seen = True
    assert (printed, seen) == ((None, False) if isolate else ("in\n", True))


def test_other_files_cannot_be_written_removed_or_made_writable(tmp_path):
    kept = tmp_path / "kept"
    kept.write_text("mine")
    code = f"""
import ctypes, os
libc = ctypes.CDLL(None)
libc.mount(None, b"/", None, 0x1020, None)
libc.umount2(b"/", 2)
tried = (
    lambda: open({str(kept)!r}, "w"),
    lambda: os.remove({str(kept)!r}),
    lambda: os.chmod({str(kept)!r}, 0),
    lambda: open({str(tmp_path / "new")!r}, "w"),
    lambda: open("/dev/shm/new", "w"),
)
for attempt in tried:
    try:
        attempt()
    except OSError as error:
        print(error.errno)
open("own", "w").write("x")
print(os.listdir())
"""
    assert output(code, "", QUICK) == "2\n" * 5 + "['own']\n"
    assert kept.read_text() == "mine"
    assert os.listdir(tmp_path) == ["kept"]  # noqa: PTH208


def test_programs_see_no_environment_but_their_own(monkeypatch):
    monkeypatch.setenv("SECRET_KEY", "hidden")
    code = "import os; print(sorted(os.environ), os.path.exists('/proc'))"
    assert output(code, "", QUICK) == "['HOME', 'LC_CTYPE', 'PATH', 'TMPDIR'] False\n"


@pytest.mark.parametrize(
    "code",
    ["while True: print('x' * 1000)", "print('x' * 10**7)", "import os; os.write(2, b'x' * 10**7)"],
)
def test_output_beyond_the_limit_fails_or_is_dropped(code):
    printed = output(code, "", replace(QUICK, file_size=10_000))
    assert printed is None or printed == ""


def test_all_files_of_a_program_share_one_limit():
    code = """
for i in range(100):
    with open(str(i), "wb") as file:
        file.write(bytes(500_000))
"""
    assert output(code, "", replace(QUICK, file_size=2**20)) is None
    assert output(code.replace("100", "2"), "", replace(QUICK, file_size=2**20)) == ""


@pytest.mark.parametrize("isolate", [True, False])
def test_no_process_and_no_file_is_left_over(isolate, tmp_path, monkeypatch, started_here):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    code = """
import os, signal, time
for number in range(1, 32):
    if number not in (signal.SIGKILL, signal.SIGSTOP):
        signal.signal(number, signal.SIG_IGN)
for leave in (os.setsid, lambda: os.setpgid(0, 0)):
    try:
        leave()
    except OSError:
        pass
open("file", "w").write("x")
time.sleep(60)
"""
    assert output(code, "", replace(QUICK, seconds=1.0, isolate=isolate)) is None
    assert not list(tmp_path.iterdir())
    assert not psutil.wait_procs(started_here(), timeout=5)[1], (
        "the kernel takes a moment for those that are killed"
    )


RUNS_LONG = """
from siirl_dask.rewards.code_execution.sandbox import SandboxLimits, output
output("import time; time.sleep(60)", "", SandboxLimits(seconds=60.0))
"""


def test_a_program_ends_with_the_process_that_runs_it():
    parent = subprocess.Popen([sys.executable, "-c", RUNS_LONG])
    family, deadline = [], time.monotonic() + 30
    while len(family) < 2:
        assert time.monotonic() < deadline
        family = psutil.Process(parent.pid).children(recursive=True)
    parent.kill()
    parent.wait()
    assert not psutil.wait_procs(family, timeout=10)[1]


REFUSED = """
from siirl_dask.rewards import code_execution
open("/proc/sys/user/max_user_namespaces", "w").write("0")
print(code_execution("p", "```python\\n```", "assert 1", isolate=False))
code_execution("p", "```python\\nopen('ran', 'w')\\n```", "assert 1")
"""


@pytest.mark.skipif(shutil.which("unshare") is None, reason="needs the command unshare")
def test_code_that_cannot_be_isolated_is_not_run():
    done = subprocess.run(
        ["unshare", "-r", sys.executable, "-c", REFUSED], capture_output=True, text=True
    )
    assert done.stdout == "1.0\n"
    assert "ConfigError: code cannot be confined here: [Errno 28] unshare" in done.stderr
    assert "isolate=False" in done.stderr


def _command(process):
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:  # a zombie as well
        return ""


@pytest.fixture
def started_here():
    """Processes that this test has started, also those whose parents have ended; other tests run
    beside it.
    """
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    before = set(psutil.Process().children(recursive=True))
    yield lambda: [
        child for child in psutil.Process().children(recursive=True) if child not in before
    ]
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 0)


@pytest.mark.parametrize("limit", ["seconds", "memory", "file_size"])
def test_limits_of_zero_are_refused(limit):
    with pytest.raises(ValueError, match=f"{limit}=0: expected more than 0"):
        code_execution("p", DOUBLE, "assert 1", **{limit: 0})


def test_a_row_that_times_out_in_the_pool_leaves_no_program_behind(tmp_path, started_here):
    ran = tmp_path / "ran"
    code = f"open({str(ran)!r}, 'w').write('x')\nimport time\ntime.sleep(60)"
    rewards = RewardsConfig(processes=1, timeout=3.0)
    reward = partial(code_execution, seconds=60.0, isolate=False)
    scorer = build_scorer(Device("w"), Rank(), rewards=rewards, reward=reward)
    rows = [{"prompt": "p", "response": f"```python\n{code}\n```", "answer": "1"}]
    assert "took more than 3 s" in scorer.score(rows)[0].failure
    scorer.close()
    assert ran.exists()
    programs = [child for child in started_here() if "code_execution.inside" in _command(child)]
    assert not psutil.wait_procs(programs, timeout=10)[1]
