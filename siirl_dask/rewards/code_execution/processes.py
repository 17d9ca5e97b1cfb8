"""Processes in a sandbox, and the bytes that go to them, between them, and from them."""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

_AT_ONCE = 2**16  # bytes


@dataclass(kw_only=True, eq=False)
class Flow:
    """Bytes under way: those that are there from the start, and what a process writes; to a
    process, or to be kept.
    """

    source: int | None = None
    sink: int | None = None
    waiting: bytearray = field(default_factory=bytearray)
    most: int | None = None
    """Most bytes that are kept, where there is no sink."""

    def read(self) -> bool:
        """Take what the source has; False when that is more than may be kept."""
        assert self.source is not None
        part = os.read(self.source, _AT_ONCE)
        if not part:
            self.source = None
        self.waiting += part
        if self.most is None:
            return True
        return len(self.waiting) <= self.most

    def write(self) -> bool:
        """Give the sink what it takes. One that is closed on the other side takes everything."""
        assert self.sink is not None
        try:
            del self.waiting[: os.write(self.sink, self.waiting[:_AT_ONCE])]
        except BrokenPipeError:
            self.waiting.clear()
        return True


class SandboxProcess:
    """A process with all that it starts, in a session of its own; leaving the context ends them
    all.
    """

    def __init__(self, command: Sequence[str], folder: str, home: str, user: int | None) -> None:
        # its processes hold one side: the other one's end says that all are gone
        self._ended, held = os.pipe()
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                cwd=folder,
                env={"PATH": os.defpath, "HOME": home, "TMPDIR": home},
                pass_fds=[held],
                start_new_session=True,
                user=user,
                group=user,
                extra_groups=None if user is None else [],
            )
        except BaseException:
            os.close(self._ended)
            raise
        finally:
            os.close(held)
        files = [
            file
            for file in (self._process.stdin, self._process.stdout, self._process.stderr)
            if file is not None
        ]
        self.stdin, self.stdout, self.stderr = (file.fileno() for file in files)
        os.set_blocking(self.stdin, False)

    def __enter__(self) -> SandboxProcess:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        for file in (self._process.stdin, self._process.stdout, self._process.stderr):
            if file is not None and not file.closed:
                file.close()
        self._process.wait()
        while os.read(self._ended, 4096):
            pass
        os.close(self._ended)

    def close_stdin(self) -> None:
        """Let the process read the end of its input."""
        assert self._process.stdin is not None
        self._process.stdin.close()

    def exit_code(self, end: float) -> int | None:
        """Return the process's exit code; None when it still runs at ``end``."""
        try:
            return self._process.wait(max(0.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            return None


def carry(flows: dict[Flow, SandboxProcess | None], awaited: Sequence[Flow], end: float) -> bool:
    """Carry bytes until the awaited sources have ended; a flow's process is the one whose standard
    input its sink is.

    False when that takes until ``end``, or when a flow without a sink gets more bytes than it may.
    """
    with selectors.DefaultSelector() as selector:
        while True:
            wanted: dict[int, tuple[int, Flow]] = {}
            for flow, process in flows.items():
                if flow.source is not None and (flow.sink is None or len(flow.waiting) < _AT_ONCE):
                    wanted[flow.source] = selectors.EVENT_READ, flow
                if flow.sink is not None and flow.waiting:
                    wanted[flow.sink] = selectors.EVENT_WRITE, flow
                elif flow.sink is not None and flow.source is None and process is not None:
                    process.close_stdin()
                    flow.sink = None
            left = end - time.monotonic()
            if all(flow.source is None for flow in awaited):
                return True
            if left <= 0:
                return False
            for file, (event, flow) in wanted.items():
                selector.register(file, event, flow)
            for key, _ in selector.select(left):
                if not (key.data.read() if key.events & selectors.EVENT_READ else key.data.write()):
                    return False
            for file in wanted:
                selector.unregister(file)
