"""Starts programs forked from a process that has imported everything, in place of a new
interpreter.

The imports of a run's driver, and once more those of the process that its workers are forked from,
take longer than most runs of tests. What differs from a program that a shell starts: its imports
have read the environment of this process, and it has no end of an interpreter but its exit
functions. tests/e2e/test_stops.py starts real ones.
"""

import atexit
import ctypes
import faulthandler
import fcntl
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import connection, forkserver, get_context, process, resource_tracker, util
from pathlib import Path
from types import ModuleType
from uuid import uuid4

import psutil

from siirl_dask.testing.hosts import Host
from siirl_dask.worker.process.fork_server import START_METHOD, prepare_processes

# PR_SET_CHILD_SUBREAPER of prctl(2): whoever loses its parent below this process becomes its child
_SUBREAPER = 36
_PATIENCE = 3.0  # seconds that processes of a program may outlive it
_SERVER = "from multiprocessing.forkserver import main"
_HIGH = 500  # the first number for a file that has to make way for others


@dataclass(frozen=True)
class _Program:
    words: list[str]
    environment: dict[str, str]
    folder: str
    printed: list[str]
    """Files for what it prints and for its errors."""
    host: int | None
    """Process id of the first process of a host of the lab."""
    alone: bool


class ForkedProgram:
    """A program of Python as ``subprocess.Popen`` has it, with what it prints in files."""

    def __init__(
        self,
        words: Sequence[object],
        environment: Mapping[str, str] | None,
        output: Path,
        errors: Path | None = None,
        host: Host | None = None,
        cwd: Path | None = None,
        alone: bool = False,
    ) -> None:
        """Start what ``python *words`` would, in a session of its own: ``-m module``, ``-c code``
        or a file.

        ``environment`` and ``cwd``: this process's, unless they are named. ``output`` and
        ``errors`` take what it prints; without ``errors`` both go to ``output``. ``host``: of the
        lab. ``alone``: it starts no processes.
        """
        if environment is None:
            environment = os.environ
        if errors is None:
            errors = output
        if cwd is None:
            cwd = Path.cwd()
        self.returncode: int | None = None
        self.stdout = _Following(output, self)
        self.stderr = _Following(errors, self)
        self._merged = errors == output
        self._lock = threading.Lock()
        program = _Program(
            words=[str(word) for word in words],
            environment=dict(environment),
            folder=str(cwd),
            printed=[str(output), str(errors)],
            host=None if host is None else host.pid,
            alone=alone,
        )
        output.touch()
        errors.touch()
        prepare_processes()
        context = get_context(START_METHOD)
        self._news, others = context.Pipe(duplex=False)
        self._keeper = context.Process(target=_keep, args=(program, others))
        self._keeper.start()
        others.close()
        self.pid: int = self._news.recv()

    def poll(self) -> int | None:
        """Return its exit status, negative for a signal, or None while it runs."""
        with self._lock:
            if self.returncode is None and self._news.poll():
                self.returncode = self._news.recv()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Return its exit status once it has ended. subprocess.TimeoutExpired after ``timeout``
        seconds.
        """
        if self.poll() is None:
            connection.wait([self._news], timeout)
        status = self.poll()
        if status is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
        return status

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Return what it printed since the last reading of ``stdout``, and its errors, once it
        has ended.
        """
        self.wait(timeout)
        printed = self.stdout.read()
        if self._merged:
            return printed, ""
        return printed, self.stderr.read()

    def send_signal(self, number: int) -> None:
        """Send it a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill it, unless it has ended."""
        self.send_signal(signal.SIGKILL)

    def left_over(self) -> list[str]:
        """Return which processes, started by it or by what it started, run on a while after it
        has ended.
        """
        self.wait()
        left: list[str] = self._news.recv()
        self._keeper.join()
        return left


class _Following:
    """Reads a file to which a process still writes, as a pipe from that process is read."""

    def __init__(self, path, process):
        self._path = path
        self._process = process
        self._file = None

    def readline(self):
        """Return the next line, or nothing once the process has ended."""
        line = ""
        while not line.endswith("\n"):
            ended = self._process.poll() is not None
            more = self._open().readline()
            line += more
            if not more and ended:
                break
            if not more:
                time.sleep(0.02)
        return line

    def read(self):
        """Return all that comes until the process ends."""
        self._process.wait()
        return self._open().read()

    def __iter__(self):
        return iter(self.readline, "")

    def _open(self):
        if self._file is None:
            self._file = self._path.open(errors="backslashreplace")
        return self._file


def _keep(program, news):
    """Start the program, tell its process id, how it ended, and what it left."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_SUBREAPER, 1, 0, 0, 0)
    spaces = []
    if program.host is not None:
        found = Path(f"/proc/{program.host}/ns")
        if not (found / "user").samefile("/proc/self/ns/user"):  # the lab of a user who is not root
            _enter(libc, os.open(found / "user", os.O_RDONLY))
        spaces = [os.open(found / kind, os.O_RDONLY) for kind in ("ipc", "uts", "net", "mnt")]
        # this process stays where it is, its children do not
        _enter(libc, os.open(found / "pid", os.O_RDONLY))
    pid = os.fork()
    if pid == 0:
        news.close()
        _be_program(program, libc, spaces)
    news.send(pid)
    status = None
    while status is None:
        ended, how = os.wait()
        if ended == pid:
            status = os.waitstatus_to_exitcode(how)
    news.send(status)
    news.send(_left_over())


def _enter(libc, space):
    if libc.setns(space, 0):
        raise OSError(ctypes.get_errno(), "setns")
    os.close(space)


def _left_over():
    """Return what is left of a program a while after it has ended."""
    late = time.monotonic() + _PATIENCE
    try:
        while time.monotonic() < late:
            if os.waitpid(-1, os.WNOHANG) == (0, 0):
                time.sleep(0.02)
    except ChildProcessError:  # there is none
        return []
    return [f"{child.pid} {child.name()}" for child in psutil.Process().children(recursive=True)]


def _be_program(program, libc, spaces):
    """Run a program in namespaces of a host as an interpreter would, to the end of this process."""
    code = 1
    try:
        os.setsid()
        for number, path in enumerate(program.printed, 1):
            os.dup2(os.open(path, os.O_WRONLY | os.O_APPEND), number)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for space in spaces:
            _enter(libc, space)
        os.chdir(program.folder)
        _take_environment(program.environment)
        faulthandler.enable()
        _forget_parent()
        if not program.alone:
            _fork_server_ahead()
        code = _run(program.words)
        threading._shutdown()
        atexit._run_exitfuncs()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _run(words):
    """Run the words; returns what becomes the exit status."""
    try:
        if words[0] == "-m":
            sys.argv = words[1:]
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        elif words[0] == "-c":
            sys.argv = ["-c", *words[2:]]
            sys.modules["__main__"] = ModuleType("__main__")
            exec(compile(words[1], "<string>", "exec"), vars(sys.modules["__main__"]))
        else:
            sys.argv = words
            sys.path.insert(0, str(Path(words[0]).parent))
            runpy.run_path(words[0], run_name="__main__")
    except SystemExit as end:
        if end.code is None:
            return 0
        if isinstance(end.code, int):
            return end.code
        print(end.code, file=sys.stderr)
        return 1
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def _take_environment(environment):
    import dask  # not at the top: Dask would take pytest's log handlers for its own
    import distributed.utils

    os.environ.clear()
    os.environ.update(environment)
    named = environment.get("PYTHONPATH", "").split(os.pathsep)
    for path in [*reversed(named), str(Path.cwd())]:
        if path and path not in sys.path:
            sys.path.insert(0, path)
    dask.config.refresh()
    distributed.utils._forkserver_preload_set = True  # all that it would name is imported


def _forget_parent():
    """Have no fork server and no resource tracker yet, and be nobody's child."""
    known = forkserver._forkserver
    os.close(known._forkserver_alive_fd)
    known.__init__()
    resource_tracker._resource_tracker.__init__()
    process._parent_process = None
    process._children.clear()
    util._finalizer_registry.clear()


def _fork_server_ahead():
    """Fork, while this process has one thread, what becomes its fork server where it is about to
    start one.
    """
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ahead = os.fork()
    if ahead == 0:
        ours.close()
        _be_fork_server(its)
    its.close()
    start = util.spawnv_passfds

    def start_or_take(path, words, files):
        if ours.fileno() < 0 or not words[-1].startswith(_SERVER):
            return start(path, words, files)
        mask = [int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, [])]
        order = {
            "command": words[-1],
            "files": list(files),
            "environment": dict(os.environ),
            "mask": mask,
        }
        socket.send_fds(ours, [json.dumps(order).encode()], files)
        ours.close()
        return ahead

    util.spawnv_passfds = start_or_take


def _be_fork_server(orders):
    """Wait for what an interpreter would be started with, and do that. Ends with the process
    that might send it.
    """
    code = 1
    try:
        order, files, _, _ = socket.recv_fds(orders, 1 << 20, 8)
        if order:
            order = json.loads(order)
            orders.close()
            moved = [fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, _HIGH) for file in files]
            for file in files:
                os.close(file)
            for file, number in zip(moved, order["files"], strict=True):
                os.dup2(file, number)
                os.close(file)
            os.environ.clear()
            os.environ.update(order["environment"])
            signal.pthread_sigmask(signal.SIG_SETMASK, order["mask"])
            exec(order["command"], {})
        code = 0
    except SystemExit:
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def forked_on(
    folder: Path,
) -> Callable[[Host, Sequence[object], Mapping[str, str], Path | None], ForkedProgram]:
    """Return how programs are started on hosts of the lab; those without a file for what they
    print get one.
    """

    def start(host, words, environment, output):
        if output is None:
            output = folder / f"{uuid4().hex}.log"
        process = ForkedProgram(words, environment, output, host=host)
        host.ends_with_host(process)
        return process

    return start


def run_forked(
    *words: object, folder: Path, cwd: Path | None = None, timeout: float = 170
) -> subprocess.CompletedProcess[str]:
    """Return how a program ended, and what it printed, as ``subprocess.run`` does; ``folder``
    takes that.
    """
    if START_METHOD != "forkserver":
        command = [sys.executable, *map(str, words)]
        return subprocess.run(command, capture_output=True, text=True, cwd=cwd, timeout=timeout)
    name = uuid4().hex
    program = ForkedProgram(words, None, folder / f"{name}-out", folder / f"{name}-err", cwd=cwd)
    try:
        output, errors = program.communicate(timeout)
    finally:
        program.kill()
    return subprocess.CompletedProcess(list(words), program.wait(), output, errors)
