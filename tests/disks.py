"""Disks of a few bytes, for tests of what a full one does."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def small_disk(place: Path, nbytes: int) -> Iterator[Path]:
    """Mount a disk of ``nbytes`` at ``place``; skip the test where that is not allowed."""
    command = ["mount", "-t", "tmpfs", "-o", f"size={nbytes}", "tmpfs", str(place)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except FileNotFoundError:
        pytest.skip("there is no command mount")
    if done.returncode:
        pytest.skip(f"a small disk needs a mount, as root: {done.stderr.strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True, timeout=20)
