"""Rewards for child processes: in a module of tests, each child would import all that the tests
do, four seconds.
"""

import asyncio
import os
import time
from pathlib import Path


def length(prompt, response, answer):
    return len(response)


def parts(prompt, response, answer):
    return {"reward": 0.5, "format": 1.0} if response else {"reward": 0.25, "empty": 1}


def says_42(data_source, solution_str, ground_truth, extra_info):
    return float(solution_str == "42")


def counts_turns(data_source, solution_str, ground_truth, extra_info):
    return extra_info["num_turns"]


def with_extra(prompt, response, answer, *, level, **extra):
    assert not extra
    return level


async def slow_and_async(prompt, response, answer):
    await asyncio.sleep(0 if response == "quick" else 60)
    return 1.0


def capricious(prompt, response, answer):
    match response:
        case "hang":
            while True:
                pass
        case "die":
            os._exit(3)
        case "raise":
            raise RuntimeError("no")
        case "nan":
            return float("nan")
        case "text":
            return "1.0"
        case "nameless":
            return {"format": 1.0}
    return 1.0


def tells_its_process(prompt, response, answer):
    Path(response).write_text(str(os.getpid()))
    if prompt == "hang":
        while True:
            pass
    return 1.0


def fails_and_counts(prompt, response, answer):
    """Fail as ``prompt`` says, after touching the file ``response``."""
    Path(response).touch()
    match prompt:
        case "hang":
            time.sleep(600)
        case "raise":
            raise RuntimeError("no")
    return 1.0


async def fails_and_counts_async(prompt, response, answer):
    Path(response).touch()
    if prompt == "hang":
        await asyncio.sleep(600)
    raise RuntimeError("no")


def length_of_prompt_text(prompt, response, answer, prompt_text="none"):
    return float(len(prompt_text))
