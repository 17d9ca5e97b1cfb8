"""A reward for programs: the share of the tests in the answer that the response's code passes."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from siirl_dask.rewards.code_execution.sandbox import SandboxLimits, output, passes, passes_together

_BLOCK = re.compile(r"```[ \t]*(?:python3?|py)?[ \t]*\r?\n(.*?)```", re.DOTALL | re.IGNORECASE)
Test = str | tuple[str, str]
"""Code that asserts, or the input of a program and the output that it must print."""


def code_execution(
    prompt: object,
    response: str,
    answer: object,
    *,
    seconds: float = 10.0,
    memory: int = 2**30,
    file_size: int = 2**20,
    isolate: bool | str = True,
    readable: Sequence[str] = (),
    forgeable: bool = False,
    **extra: object,
) -> float:
    """Return the share of the tests in ``answer`` that the response's last Python code block
    passes; 0.0 without one.

    A test is code that asserts, or ``{input, output}`` of a program, compared line by line without
    white space at the ends. ``answer`` is one test, a list of tests, or that list as JSON. The
    program runs once for each test, in a process that can do no harm (see Limits) and that the test
    is not in: see docs/rewards.md for what a test may do, and for ``forgeable``, which runs both in
    one. All tests of a response share ``seconds``: a test that no time is left for is not passed.
    ValueError when ``answer`` holds no test, or one that cannot be run apart from the program;
    ConfigError where the code cannot be isolated.
    """
    tests = list(_tests(answer))
    limits = SandboxLimits(
        seconds=seconds,
        memory=memory,
        file_size=file_size,
        isolate=isolate,
        readable=tuple(readable),
    )
    blocks = _BLOCK.findall(response)
    if not blocks:
        return 0.0
    end = time.monotonic() + seconds
    passed = 0
    for test in tests:
        left = end - time.monotonic()
        passed += left > 0 and _passes(blocks[-1], test, replace(limits, seconds=left), forgeable)
    return passed / len(tests)


def _passes(code: str, test: Test, limits: SandboxLimits, forgeable: bool) -> bool:
    if isinstance(test, str):
        if forgeable:
            return passes_together(code, test, limits)
        return passes(code, test, limits)
    stdin, expected = test
    printed = output(code, stdin, limits)
    if printed is None:
        return False
    return _lines(printed) == _lines(expected)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


def _tests(answer: object) -> Iterator[Test]:
    items = _decoded(answer)
    if isinstance(items, str) or not isinstance(items, Sequence):
        items = [items]
    if not items:
        raise ValueError(
            "answer holds no tests: expected code that asserts, or {input, output}, or a list of "
            "such"
        )
    for item in items:
        if isinstance(item, str) and item.strip():
            yield item
        elif (
            isinstance(item, Mapping)
            and isinstance(item.get("input"), str)
            and isinstance(item.get("output"), str)
        ):
            yield item["input"], item["output"]
        else:
            raise ValueError(
                f"answer holds {item!r:.200}: expected code that asserts, or {{input, output}} as "
                "texts"
            )


def _decoded(answer: object) -> object:
    """Return the value of a text that is JSON of a list or a mapping. Any other text is code and
    returned as it is.
    """
    if not isinstance(answer, str) or not answer.lstrip().startswith(("[", "{")):
        return answer
    try:
        return json.loads(answer)
    except ValueError:
        return answer
