"""Agents of the tests: functions that talk to the endpoint with the openai client."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import sys
import threading
from pathlib import Path

import openai

RELEASED = threading.Event()
"""Set to let ``blocks`` go on."""


def talking_to(client):
    """Return an openai client that reads no certificates, which take a tenth of a second."""
    # by its module: it cannot be pickled by name
    plain = openai.DefaultAsyncHttpxClient(verify=False)
    return openai.AsyncOpenAI(base_url=client.base_url, api_key=client.api_key, http_client=plain)


async def asks_once(client, row):
    async with talking_to(client) as ai:
        done = await ai.completions.create(model=client.model, prompt=row["prompt"])
        return float(len(done.choices[0].text))


async def talks(client, row):
    """Three turns, with pauses that differ from run to run; then it starts over with a summary."""
    async with talking_to(client) as ai:
        messages = [{"role": "user", "content": row["prompt"]}]
        for words in ("go on", "and then?"):
            await asyncio.sleep(random.random() / 20)
            done = await ai.chat.completions.create(
                model=client.model, messages=messages, max_tokens=5
            )
            messages += [done.choices[0].message, {"role": "user", "content": words}]
        await asyncio.sleep(random.random() / 20)
        summary = [{"role": "user", "content": f"in short: {len(messages)}"}]
        done = await ai.chat.completions.create(model=client.model, messages=summary, max_tokens=5)
        return {"reward": float(len(done.choices[0].message.content)), "asked": 3.0}


async def maps(client, row):
    """Asks three things at once."""
    async with talking_to(client) as ai:
        asked = [ai.completions.create(model=client.model, prompt=f"{row['prompt']} {part}", max_tokens=4)
                 for part in random.sample("abc", 3)]  # fmt: skip
        await asyncio.gather(*asked)
        return 1.0


async def fails_for_one(client, row):
    result = await asks_once(client, row)
    if row["prompt"] == "say 1":
        raise ValueError("no tool for that")
    return result


async def raises(client, row):
    raise ValueError("no tool for that")


async def raises_half_a_character(client, row):
    raise ValueError("no tool a\ud83db")


async def exits(client, row):
    """Does what a harness does with a wrong argument."""
    sys.exit("usage: agent")


async def hangs(client, row):
    await asyncio.sleep(3600)


async def asks_nothing(client, row):
    return 1.0


async def gives_text(client, row):
    await asks_once(client, row)
    return "very good"


async def rejects(client, row):
    await asks_once(client, row)


async def blocks(client, row):
    """Not what the loop of all agents likes: a call that waits in its thread."""
    openai.OpenAI(base_url=client.base_url, api_key=client.api_key).completions.create(
        model=client.model, prompt="p"
    )
    RELEASED.wait(60)
    return 1.0


async def tells_its_row(client, row):
    await asks_once(client, row)
    return {"reward": 0.0, "level": row["level"], "seed": float(client.seed % 1000)}


async def counts_digits(client, row):
    """Two turns, with pauses that differ from run to run; the reward is the share of digits."""
    async with talking_to(client) as ai:
        text, digits = row["prompt"], 0
        for _ in range(2):
            await asyncio.sleep(random.random() / 20)
            done = await ai.completions.create(model=client.model, prompt=text, max_tokens=8)
            text += f"{done.choices[0].text}\nMore:"
            digits += sum(character in "0123456789" for character in done.choices[0].text)
        return digits / 16


async def notes_and_hangs(client, row):
    """A file, which the environment names, tells that an agent waits."""
    await asks_once(client, row)
    Path(os.environ["NOTED"]).touch()
    await hangs(client, row)


async def counts_digits_slowly_on_one_worker(client, row, *, noted):
    """The first process that notes itself in the file is slow."""
    with contextlib.suppress(FileExistsError), Path(noted).open("x") as file:
        file.write(str(os.getpid()))
    if Path(noted).read_text() in ("", str(os.getpid())):
        await asyncio.sleep(1)
    return await counts_digits(client, row)
