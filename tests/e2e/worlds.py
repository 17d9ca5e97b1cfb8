"""Environments of whole runs: they answer after random delays, and their words depend on what
was said alone.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace

from siirl_dask.environments import Opening, Step
from tests.images.pictures import png


class Delayed:
    """Two to four turns by what is said; a reward for digits; every third answer begins a new
    history.
    """

    rewrites = False

    async def reset(self, row, seed):
        await asyncio.sleep(random.random() * 0.05)
        self.turns, self.left = 0, 4

    async def step(self, text):
        await asyncio.sleep(random.random() * 0.05)
        self.turns += 1
        self.left -= 1 + sum(map(ord, text)) % 2
        reward = sum(letter in "0123456789" for letter in text) / 4
        if self.left <= 0:
            return Step(reward=reward, done=True, state=self.turns)
        if self.rewrites and self.turns == 1:
            return Step(history=f"After {len(text)}:", reward=reward)
        return Step(
            observation=f" {len(text)}!",
            reward=reward,
            state=self.turns,
            parts={"said": float(len(text))},
        )


class LogNormal(Delayed):
    """Answers after a log-normal time: most soon, some many times as late."""

    async def step(self, text):
        await asyncio.sleep(min(random.lognormvariate(-4.0, 1.5), 1.0))
        return await super().step(text)


class Rewritten(Delayed):
    rewrites = True


class Talking:
    """Two agents speak in turn, by what is said; the one with more digits wins: a zero-sum game."""

    async def reset(self, row, seed):
        self.digits = {"a": 0, "b": 0}
        self.turns, self.speaker = 0, "a"
        return Opening(agent="a")

    async def step(self, text):
        await asyncio.sleep(random.random() * 0.05)
        self.digits[self.speaker] += sum(letter in "0123456789" for letter in text)
        self.turns += 1
        if self.turns == 4:
            won = (self.digits["a"] > self.digits["b"]) - (self.digits["a"] < self.digits["b"])
            return Step(done=True, reward={"a": float(won), "b": float(-won)})
        self.speaker = "ab"[(self.turns + len(text)) % 2]
        return Step(observation="?", agent=self.speaker)


class Broken(Delayed):
    """Fails for two prompts in four: at a turn, or before the first."""

    async def step(self, text):
        if self.chosen == 1:
            raise ValueError("no luck")
        return await super().step(text)

    async def reset(self, row, seed):
        self.chosen = sum(map(ord, row["prompt"])) % 4
        if self.chosen == 0:
            raise ValueError("no luck")
        await super().reset(row, seed)


class Looking(Delayed):
    """Shows a picture after each turn, whose size and content depend on what was said, and one
    at some beginnings.
    """

    async def reset(self, row, seed):
        await super().reset(row, seed)
        if len(row["prompt"][-1]["content"]) % 2:
            return [
                *row["prompt"],
                {"role": "user", "content": [{"type": "image", "image": png(16, 24, 1)}]},
            ]
        return None

    async def step(self, text):
        answer = await super().step(text)
        if answer.done:
            return answer
        shown = {
            "type": "image",
            "image": png(16 + 8 * (len(text) % 2), 16, sum(map(ord, text)) % 7),
        }
        return replace(answer, observation=[shown, {"type": "text", "text": "?"}])


class Waiting:
    """Waits long for each answer."""

    async def reset(self, row, seed):
        pass

    async def step(self, text):
        await asyncio.sleep(60)
        return "x"
