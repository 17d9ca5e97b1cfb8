"""Collects warnings that the checks' own parts log, which are findings here."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def warnings_of(name: str) -> Iterator[list[str]]:
    """Yield the warnings that are logged under ``name`` inside the block; they are printed
    nowhere.
    """
    log = logging.getLogger(name)
    collector = _Collector()
    propagate = log.propagate
    log.propagate = False
    log.addHandler(collector)
    try:
        yield collector.texts
    finally:
        log.removeHandler(collector)
        log.propagate = propagate


class _Collector(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())
