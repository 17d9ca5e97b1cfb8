import os
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from siirl_dask.coordinator.databuffer.arena import (
    Arena,
    Attachments,
    CannotMap,
    Handle,
    unpack_handle,
)
from siirl_dask.errors import PeerError
from tests.memory_files import left_since, unused_files

MIB = 2**20
needs_memfd = pytest.mark.skipif(
    not hasattr(os, "memfd_create"), reason="shared memory needs Linux"
)


@given(st.lists(st.tuples(st.integers(0, 5000), st.booleans()), min_size=1, max_size=60))
def test_blocks_in_use_never_share_a_byte(steps):
    arena, held = Arena(keep=0), []
    for stamp, (size, let_go) in enumerate(steps):
        if let_go and held:
            held.pop(stamp % len(held))
        block = arena.allocate(size)
        block.bytes[:] = stamp % 256
        held.append((block, stamp % 256))
    for block, stamp in held:
        assert (block.bytes == stamp).all()
        assert block.offset % 64 == 0
    assert arena.in_use >= sum(block.size for block, _ in held)
    del block
    held.clear()
    assert arena.in_use == 0


def test_memory_of_a_dropped_block_is_used_again():
    arena = Arena(keep=256 * MIB)
    first = arena.allocate(100 * MIB)
    where = first.segment.bytes.ctypes.data + first.offset
    del first
    for _ in range(5):
        block = arena.allocate(100 * MIB)
        assert block.segment.bytes.ctypes.data + block.offset == where
        del block
    assert arena.held < 128 * MIB


def test_no_more_than_the_limit_is_kept_for_reuse():
    arena = Arena(keep=100 * MIB)
    blocks = [arena.allocate(80 * MIB) for _ in range(5)]
    assert arena.held >= 400 * MIB
    blocks.clear()
    assert arena.in_use == 0
    assert arena.held <= 100 * MIB


def test_an_arrow_buffer_keeps_its_block():
    arena = Arena(keep=0)
    block = arena.allocate(8)
    block.bytes[:] = np.array([7], np.int64).view(np.uint8)
    array = pa.Array.from_buffers(pa.int64(), 1, [None, block.buffer()])
    del block
    assert arena.in_use > 0
    assert array.to_pylist() == [7]
    del array
    assert arena.in_use == 0


def test_a_retired_segment_is_never_given_out_again():
    arena = Arena(keep=256 * MIB)
    block = arena.allocate(100)
    retired = block.segment
    arena.retire(retired)
    del block
    assert arena.allocate(100).segment is not retired


@needs_memfd
def test_another_process_of_this_host_can_write_into_a_segment():
    block = Arena(keep=0).allocate(1000)
    handle = block.segment.handle
    script = f"""
        from siirl_dask.coordinator.databuffer.arena import Attachments, Handle
        Attachments(writable=True).attach(Handle(*{handle.pack()!r}))[{block.offset}:{block.offset + 1000}] = 42
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=True)
    assert (block.bytes == 42).all()


@needs_memfd
def test_discarded_memory_is_free_even_while_a_peer_has_it_mapped():
    arena, attachments = Arena(keep=0), Attachments(writable=True)
    block = arena.allocate(200 * MIB)
    attachments.attach(block.segment.handle)[:] = 1
    full = shared_memory()
    del block
    assert arena.in_use == 0
    assert shared_memory() < full - 150 * MIB


@needs_memfd
def test_a_handle_of_a_process_that_was_restarted_is_refused():
    """The new process has the same pid and opens its segment under the same number, as a
    container's often does.
    """
    arena = Arena(keep=0)
    block = arena.allocate(10)
    old = block.segment.handle
    del block, arena
    new = Arena(keep=0).allocate(10).segment
    with pytest.raises(CannotMap):
        Attachments(writable=True).attach(replace(old, fd=new.handle.fd, size=new.handle.size))


@needs_memfd
def test_handles_that_name_something_else_are_refused(tmp_path):
    reader, writer = os.pipe()
    file = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    os.ftruncate(file, 8192)
    growing = os.memfd_create("x", os.MFD_ALLOW_SEALING)
    os.ftruncate(growing, 8192)
    for fd in (reader, writer, file, growing, 987654):
        with pytest.raises(CannotMap):
            Attachments(writable=True).attach(Handle(os.getpid(), fd, 8192, b"0" * 16))
    with pytest.raises(CannotMap):
        Attachments(writable=True).attach(Handle(2**30, 3, 8192, b"0" * 16))
    for fd in (reader, writer, file, growing):
        os.close(fd)


@example([1, 0, 8192, b""])
@example([1, 0, 8192, b"0" * 17])
@example([1, 0, 0, b"0" * 16])
@given(
    st.recursive(
        st.none() | st.integers() | st.text(max_size=3) | st.binary(max_size=15),
        st.lists,
        max_leaves=6,
    )
)
def test_values_that_are_no_handle_are_refused(value):
    with pytest.raises(PeerError):
        unpack_handle(value)


@pytest.mark.alone
@needs_memfd
def test_a_process_that_is_killed_leaves_no_shared_memory_behind():
    before = shared_memory()
    files = unused_files()
    script = """
        from siirl_dask.coordinator.databuffer.arena import Arena
        block = Arena(keep=2**30).allocate(300 * 2**20)
        block.bytes[:] = 1
        print(*block.segment.handle.pack()[:3], block.segment.handle.nonce.hex(), flush=True)
        input()
    """
    child = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    pid, fd, size, nonce = child.stdout.readline().split()
    attachments = Attachments(writable=True)
    assert attachments.attach(Handle(int(pid), int(fd), int(size), bytes.fromhex(nonce)))[4096] == 1
    assert shared_memory() > before + 200 * MIB
    child.send_signal(signal.SIGKILL)
    child.wait()
    attachments.clear()
    deadline = time.monotonic() + 20
    while shared_memory() > before + 100 * MIB and time.monotonic() < deadline:
        os.sched_yield()
    assert shared_memory() <= before + 100 * MIB
    assert not left_since(files)


def shared_memory():
    """Return the bytes of shared memory on this machine."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Shmem:"))
