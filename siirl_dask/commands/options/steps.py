"""Reads the steps that options of the command line name: ``--steps 10:20``, ``--step 10``."""

from __future__ import annotations

import sys
from argparse import ArgumentTypeError

EVERY = range(sys.maxsize)
"""The steps of ``:``, all there are."""


def one_step(text: str) -> range:
    """Return the step that ``text`` is the number of. ArgumentTypeError if it is none."""
    if not text.isdecimal():
        raise ArgumentTypeError(f"{text!r}: expected the number of a step")
    return range(int(text), int(text) + 1)


def steps_between(text: str) -> range:
    """Return the steps of ``10:20`` (both ends count), ``10:``, ``:20``, ``:`` or ``10``.

    ArgumentTypeError for any other text, and where the first step comes after the last.
    """
    first, colon, last = text.partition(":")
    ends = [first, last] if colon else [first]
    given = [end for end in ends if end or not colon]  # on a side of the colon none is needed
    if not all(end.isdecimal() for end in given):
        raise ArgumentTypeError(
            f"{text!r}: expected A:B or one step, such as 10:20, 10:, :20 or 10"
        )
    if not colon:
        return one_step(first)
    start = 0
    if first:
        start = int(first)
    stop = int(last) + 1 if last else sys.maxsize
    steps = range(start, stop)
    if not steps:
        raise ArgumentTypeError(f"{text!r}: the first step comes after the last")
    return steps
