"""Rewards for child processes, and nodes that tell each other where they are: see
test_overlap.py.
"""

import asyncio
import hashlib
import threading
import time


def digest(prompt, response, answer, *, length):
    """A reward, and its parts, that depend on all that the function gets."""
    text = f"{prompt} {response} {answer} {length}"
    number = int(hashlib.sha256(text.encode()).hexdigest()[:6], 16)
    if number % 11 == 0:
        raise ValueError(f"no reward for {response!r}")
    return {"reward": number / 7, **({"odd": number / 3} if number % 2 else {})}


async def digest_async(prompt, response, answer, *, length):
    await asyncio.sleep(0)
    return digest(prompt, response, answer, length=length)


CALLED = threading.Semaphore(0)
"""Counts the calls of ``tells_of_its_calls``."""


async def tells_of_its_calls(prompt, response, answer):
    CALLED.release()
    return 1.0


def never_returns(prompt, response, answer):
    time.sleep(600)


def raises(prompt, response, answer):
    raise RuntimeError(f"no reward for {response!r}")
