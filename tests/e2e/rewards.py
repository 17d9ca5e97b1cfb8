"""Rewards that go wrong, one of several parts, and one of which there is always something to
learn.
"""

import ctypes
import os
import time
from pathlib import Path


def fails_on_the_fifth(prompt, response, answer):
    return 1 / (0 if prompt.endswith("5:") or len(response) > 4 else 1)


def gives_nan(prompt, response, answer):
    return float("nan")


def digits_and_variety(prompt, response, answer):
    """The share of digits, and how many different ones there are, a reward of another scale."""
    digits = [character for character in response if character.isdigit()]
    share = len(digits) / 8
    return {"reward": share, "digits": share, "variety": 100 * len(set(digits))}


def checksum(prompt, response, answer):
    """Another number for nearly every response, of whatever a random model says."""
    return sum(map(ord, response)) % 97 / 97


def never_returns(prompt, response, answer):
    Path(os.environ["NEVER_RETURNS"]).touch()
    time.sleep(10**6)


def is_slow(prompt, response, answer):
    time.sleep(0.25)
    return len(response) / 100


def holds_the_lock(prompt, response, answer):
    """Keep the interpreter's lock for ten seconds, once."""
    if not Path(os.environ["HELD"]).exists():
        Path(os.environ["HELD"]).touch()
        ctypes.PyDLL(None).sleep(10)
    return len(response) / 100


def waits_for_a_file(prompt, response, answer):
    while not Path(os.environ["WAITED_FOR"]).exists():
        time.sleep(0.05)
    return len(response) / 100


def bytes_of_images(prompt, response, answer, images, **extra):
    return float(sum(len(image["bytes"]) for image in images))
