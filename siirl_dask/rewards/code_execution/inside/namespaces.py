"""Namespaces of one's own: no network, no other process, and a root folder with what Python
needs and nothing else.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from pathlib import Path

from siirl_dask.rewards.code_execution.inside.linux import call, prctl

FOLDER = "/sandbox"
"""The folder that a program starts in and the only one that it can write to."""
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
MOST_FILES = 1024
"""Files, folders and links that a program can make: the kernel's memory for each is not part of
their size."""

# Numbers of linux/sched.h and linux/mount.h, which ctypes lacks.
_NEWNS = 0x20000
_NEWIPC = 0x8000000
_NEWUSER = 0x10000000
_NEWPID = 0x20000000
_NEWNET = 0x40000000
_MS_NOSUID = 2
_MS_NODEV = 4
_MS_BIND = 0x1000
_MS_REC = 0x4000
_MS_PRIVATE = 0x40000
_DETACH = 2
_SET_DUMPABLE = 4  # linux/prctl.h
_MOUNT_SETATTR = 442
_AT_FDCWD = -100
_AT_RECURSIVE = 0x8000
_READ_ONLY = 1
_NO_SUID = 2
_NO_DEVICES = 4


def leave_namespaces(readable: Sequence[str], file_size: int, user: int | None) -> None:
    """Leave the machine's namespaces; the next child is the first process of its own, and starts in
    ``FOLDER``.

    ``user``: the number that the child will take, when this process is the machine's root and may
    mount without a namespace of users; where a container took that right away, it takes the number
    at once, as ``None`` is for others.
    """
    apart = _NEWNS | _NEWPID | _NEWNET | _NEWIPC
    owner = os.getuid() if user is None else user
    try:
        if user is None:
            raise PermissionError
        call("unshare", apart)
    except PermissionError:
        if user is not None:
            become(user)
            prctl(_SET_DUMPABLE, 1)  # or the files of /proc/self stay root's
        group = os.getgid()
        call("unshare", apart | _NEWUSER)
        maps = {
            "setgroups": "deny",
            "uid_map": f"{owner} {owner} 1",
            "gid_map": f"{group} {group} 1",
        }
        for name, text in maps.items():
            Path(f"/proc/self/{name}").write_text(text)
        prctl(_SET_DUMPABLE, 0)
    _mount(target=Path("/"), flags=_MS_REC | _MS_PRIVATE)
    _build_root(
        Path.cwd(), readable, f"size={file_size},nr_inodes={MOST_FILES},mode=700,uid={owner}"
    )


def become(user: int) -> None:
    """Give up being root, for good."""
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)


def _build_root(root: Path, readable: Sequence[str], options: str) -> None:
    """Make an empty folder in memory at ``root``, show in it the readable places and a few
    devices, and enter it.
    """
    _mount_memory(root, "size=1m,mode=755")
    for place in readable:
        shown = root / place.lstrip("/")
        shown.parent.mkdir(parents=True, exist_ok=True)
        if os.path.islink(place):  # noqa: PTH114
            shown.symlink_to(os.readlink(place))  # noqa: PTH115
        else:
            _show(place, shown)
            _set_attributes(shown, _AT_RECURSIVE, _READ_ONLY | _NO_SUID | _NO_DEVICES)
    (root / "dev").mkdir()
    for device in DEVICES:
        _show(device, root / device.lstrip("/"))
        _set_attributes(root / device.lstrip("/"), 0, _READ_ONLY | _NO_SUID)
    own = root / FOLDER.lstrip("/")
    own.mkdir()
    _mount_memory(own, options)
    os.chdir(root)
    call("pivot_root", b".", b".")
    call("umount2", b".", _DETACH)  # the machine's own root, which lay below
    _set_attributes(Path("/"), 0, _READ_ONLY | _NO_SUID | _NO_DEVICES)
    os.chdir(FOLDER)


def _show(place: str, shown: Path) -> None:
    if Path(place).is_dir():
        shown.mkdir(exist_ok=True)
    else:
        shown.touch()
    _mount(source=place.encode(), target=shown, flags=_MS_BIND | _MS_REC)


def _mount_memory(place: Path, options: str) -> None:
    flags = _MS_NOSUID | _MS_NODEV
    _mount(source=b"tmpfs", target=place, kind=b"tmpfs", flags=flags, options=options.encode())


def _mount(
    *,
    target: Path,
    flags: int,
    source: bytes | None = None,
    kind: bytes | None = None,
    options: bytes | None = None,
) -> None:
    call("mount", source, bytes(target), kind, flags, options)


def _set_attributes(place: Path, flags: int, attributes: int) -> None:
    wanted = struct.pack("=4Q", attributes, 0, 0, 0)
    call("syscall", _MOUNT_SETATTR, _AT_FDCWD, bytes(place), flags, wanted, len(wanted))
