"""``pytest --no-processes``, which ``make check`` runs, an end for slow machines, and lines for
every skipped test.

Without processes, a test ends as skipped at the moment when it starts a process or imports an
engine's package: Python reports both before they happen (sys.addaudithook). So nobody sorts tests
into a list: a new one is in ``make check`` as long as it needs neither.
"""

from __future__ import annotations

import importlib
import multiprocessing.util
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

UNTIL = "SIIRL_TESTS_UNTIL"
"""This environment variable says when no more tests begin, in seconds since 1970."""
ENGINES = ("megatron", "mindspeed", "playwright", "sglang", "transformers", "vllm")
"""Packages that take seconds to import, in each of pytest's processes."""
STARTS = ("os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.system", "subprocess.Popen")
"""Audit events of a process that is about to start."""
FINDERS = ("ldconfig",)
"""Programs that libraries start to find others while they are imported: torch with CUDA does."""
WHOLE_RUNS = ("e2e", "hosts")
"""Folders of tests that all run on a cluster: not even imported without processes."""
LEFT = "left to make test: "
LATE = f"left out: the time was over that {UNTIL} names"


class RefusedInThreadError(RuntimeError):
    """A thread was about to start a process or to import an engine."""


class NoProcesses:
    """Ends tests that start a process or import an engine, and reports them as skipped. A plugin
    of pytest.
    """

    def __init__(self) -> None:
        self._watching = False
        self._refused: str | None = None
        self._spawn = multiprocessing.util.spawnv_passfds
        # the one start that Python does not report
        multiprocessing.util.spawnv_passfds = self._refuse_spawn
        self._import_module = importlib.import_module
        # nor does it report this import before it looks for broken packages, for a second
        importlib.import_module = self._refuse_import
        sys.addaudithook(self._audit)

    def pytest_ignore_collect(self, collection_path: Path) -> bool | None:
        if collection_path.parent == Path(__file__).parent and collection_path.name in WHOLE_RUNS:
            return True
        return None

    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report(self) -> Iterator[Any]:
        before = set(sys.modules)
        with self._watched():
            report = yield
        if self._refused is not None:
            for name in set(sys.modules) - before:
                if name.startswith("tests."):
                    # pytest leaves a module there whose import did not come to its end
                    del sys.modules[name]
        return report

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self) -> Iterator[Any]:
        with self._watched():
            return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Iterator[Any]:
        """Report a test as skipped that went on after a refusal: one in a thread, or one that its
        code caught. A fixture that was refused raises the same error again for each further test.
        What is cleared away without an error afterwards is no second skip.
        """
        report = yield
        refused = self._refused
        if refused is None and call.excinfo is not None:
            refused = refusal_in(call.excinfo.value)
        cleared = call.when == "teardown" and report.passed
        if refused is not None and not cleared and report.outcome != "skipped":
            report.outcome = "skipped"
            report.longrepr = (str(item.path), item.location[1], refused)
        return report

    @contextmanager
    def _watched(self) -> Iterator[None]:
        self._watching = True
        self._refused = None
        try:
            yield
        finally:
            self._watching = False

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self._watching:
            return
        if event == "import" and arguments[0].partition(".")[0] in ENGINES:
            self._refuse(f"imports {arguments[0].partition('.')[0]}")
        elif event in STARTS and not is_finder(arguments):
            self._refuse("starts a process")

    def _refuse_spawn(self, *arguments: Any) -> int:
        if self._watching:
            self._refuse("starts a process")
        return self._spawn(*arguments)

    def _refuse_import(self, name: str, package: str | None = None) -> Any:
        if self._watching and name.partition(".")[0] in ENGINES:
            self._refuse(f"imports {name.partition('.')[0]}")
        return self._import_module(name, package)

    def _refuse(self, why: str) -> None:
        self._refused = f"{LEFT}{why}"
        if threading.current_thread() is threading.main_thread():
            pytest.skip(self._refused, allow_module_level=True)
        # a thread hands an Exception to who waits for it, and no Skipped
        raise RefusedInThreadError(self._refused)


def is_finder(arguments: tuple[Any, ...]) -> bool:
    """Return whether an audit event is about a program that only finds libraries."""
    return bool(arguments) and Path(str(arguments[0])).name in FINDERS


class Until:
    """Skips tests that would begin after a time, so that the others are reported in time. A
    plugin of pytest.
    """

    def __init__(self, end: float) -> None:
        """``end``: seconds since 1970."""
        self._end = end

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self) -> None:
        if time.time() > self._end:
            pytest.skip(LATE)


def refusal_in(error: BaseException | None) -> str | None:
    """Return what was refused in a thread, where that led to the error."""
    while error is not None:
        if isinstance(error, RefusedInThreadError):
            return str(error)
        error = error.__cause__ or error.__context__
    return None


def skipped_lines(reports: list[Any]) -> list[str]:
    """Return a line for each reason why tests were skipped: how many, the reason, and their
    files.
    """
    counts: Counter[str] = Counter()
    files: dict[str, set[str]] = {}
    for report in reports:
        reason = " ".join(report.longrepr[2].removeprefix("Skipped: ").split())
        counts[reason] += 1
        files.setdefault(reason, set()).add(report.nodeid.partition("::")[0])
    lines = []
    for reason, count in counts.most_common():
        names = sorted(files[reason])
        shown = ", ".join(names[:3])
        more = f" and {len(names) - 3} more files" if len(names) > 3 else ""
        lines.append(f"{count:6} {reason} ({shown}{more})")
    return lines
