"""Agents that are programs: one process for each episode, with the endpoint in its environment."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from siirl_dask.devices.cpus import unbind
from siirl_dask.rollout.endpoint.agents import Client

_KEPT = 64 * 1024  # bytes at the end of what a program prints
_SHOWN = 1000  # characters of it in an error
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_BECOME = """
import ctypes, os, select, signal, sys
option, sign, *command = sys.argv[1:]
ctypes.CDLL(None).prctl(int(option), int(sign))
try:
    watched = os.pidfd_open(os.getpid())
except OSError:  # a kernel without them
    watched = None
if watched is None:
    pass
elif child := os.fork():
    os.close(watched)
    os.waitpid(child, 0)
else:
    if os.fork():
        os._exit(0)
    for file in range(3):
        os.close(file)
    select.select([watched], [], [])
    os.killpg(0, signal.SIGKILL)
try:
    os.execvp(command[0], command)
except OSError as error:
    sys.exit(f"{command[0]}: {error.strerror}")
"""


@dataclass(frozen=True, slots=True)
class Program:
    """An Agent: runs a command, whose last line on standard output is the reward, as JSON.

    It finds ``OPENAI_BASE_URL``, ``OPENAI_API_KEY``, ``OPENAI_MODEL`` and ``SIIRL_SEED`` in its
    environment, and the columns of its row as a JSON object on standard input. It and all that it
    has started are killed in the end.
    """

    command: Sequence[str]

    async def __call__(self, client: Client, row: Mapping[str, Any]) -> Any:
        """Return the reward. FileNotFoundError for no program, RuntimeError for one that fails
        or prints no reward.
        """
        given = {
            "OPENAI_BASE_URL": client.base_url,
            "OPENAI_API_KEY": client.api_key,
            "OPENAI_MODEL": client.model,
            "SIIRL_SEED": str(client.seed),
        }
        if shutil.which(self.command[0]) is None:
            raise FileNotFoundError(f"{self.command[0]!r} is no program on the PATH of the worker")
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            *_dying_with_parent(self.command),
            stdin=pipe,
            stdout=pipe,
            stderr=pipe,
            env={**os.environ, **given},
            start_new_session=True,  # so that what it starts can be killed with it
        )
        unbind(process.pid)
        try:
            text = json.dumps(dict(row), default=str).encode()
            _, said, complaint = await asyncio.gather(
                _tell(process, text), _end_of(process.stdout), _end_of(process.stderr)
            )
            code = await process.wait()
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            with suppress(asyncio.CancelledError):
                await asyncio.shield(process.wait())
        if code:
            raise RuntimeError(f"the command ended with code {code}: {complaint.strip()[-_SHOWN:]}")
        return _reward(said)


def _reward(said: str) -> Any:
    last = (said.strip().splitlines() or [""])[-1]
    try:
        return json.loads(last)
    except ValueError as error:
        raise RuntimeError(
            f"its last line is {last[:_SHOWN]!r}: expected the reward as JSON"
        ) from error


async def _tell(process: asyncio.subprocess.Process, text: bytes) -> None:
    assert process.stdin is not None
    with suppress(BrokenPipeError, ConnectionResetError):  # a program may leave its row unread
        process.stdin.write(text)
        await process.stdin.drain()
    process.stdin.close()


async def _end_of(stream: asyncio.StreamReader | None) -> str:
    """Return the end of what a stream gives, however long that is."""
    assert stream is not None
    kept = b""
    while chunk := await stream.read(_KEPT):
        kept = (kept + chunk)[-_KEPT:]
    return kept.decode(errors="replace")


def _dying_with_parent(command: Sequence[str]) -> list[str]:
    """Return a command that becomes the given one, which the kernel kills with the thread that
    starts it (on Linux).

    A second process stays beside it, which kills all that it has started when it has ended, however
    that was. The new process asks for that itself: Python code between fork and exec crashes in a
    process of many threads.
    """
    if sys.platform != "linux":
        return [*command]
    return [
        sys.executable,
        "-I",
        "-S",
        "-c",
        _BECOME,
        str(_PR_SET_PDEATHSIG),
        str(int(signal.SIGKILL)),
        *command,
    ]
