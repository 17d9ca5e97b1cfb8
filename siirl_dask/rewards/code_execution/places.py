"""Places of the machine that a program sees, and the command that starts it: by itself or in
another's sandbox.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import stat
import sys
from collections.abc import Sequence
from pathlib import Path

from siirl_dask.errors import ConfigError
from siirl_dask.rewards.code_execution import inside
from siirl_dask.rewards.code_execution.inside.namespaces import DEVICES, FOLDER

ISOLATIONS = (True, "namespaces", "bubblewrap", "runsc", False)
"""The values of ``isolate``; True is namespaces."""

_PROGRAMS = {"bubblewrap": "bwrap", "runsc": "runsc"}
_SYSTEM = (
    "/usr",
    "/bin",
    "/sbin",
    "/lib",
    "/lib32",
    "/lib64",
    "/libx32",
    "/etc/ld.so.cache",
    "/etc/localtime",
)
_HERE = str(Path(__file__).parent)
_NAMES = __name__.split(".")[:-1]
_START = f"""
import sys, types
for name in {[".".join(_NAMES[: depth + 1]) for depth in range(len(_NAMES))]}:
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [{_HERE!r}]
from {inside.__name__}.main import main
main()
"""  # without the packages above it: to import those takes longer than most programs run
_WHOLE_MACHINE = ["0", "0", str(2**32 - 1)]
_UNUSED_USERS = 0x7A000000, 2**24  # nobody's: the first number, and how many to choose from


def python_command() -> list[str]:
    """Return the command that runs one task, which it reads from its standard input."""
    return [sys.executable, "-I", "-B", "-X", "utf8", "-c", _START]


def readable_places(more: Sequence[str]) -> list[str]:
    """Return the files and folders that a program can read: the system's and Python's libraries,
    and ``more``.

    ConfigError for one of ``more`` that is not there, or that only its owner may read where root
    runs the programs.
    """
    for place in more:
        if not Path(place).is_absolute() or not Path(place).exists():
            raise ConfigError(
                f"readable names {place!r}: expected the absolute path of a file or folder that "
                "exists"
            )
        if os.geteuid() == 0 and not Path(place).stat().st_mode & stat.S_IROTH:
            raise ConfigError(
                f"readable names {place!r}, which others may not read, and root's programs run as "
                "another user"
            )
    pythons = {
        sys.prefix,
        sys.exec_prefix,
        sys.base_prefix,
        sys.base_exec_prefix,
        f"{_HERE}/inside",
    } - {"/"}
    places = sorted(place for place in {*_SYSTEM, *pythons, *more} if Path(place).exists())
    return [
        place for place in places if not any(str(above) in places for above in Path(place).parents)
    ]


def closed_folder() -> str | None:
    """Return a folder above Python or this package that others than its owner may not enter;
    None where all may.
    """
    for place in (sys.executable, sys.prefix, sys.base_prefix, _HERE):
        for folder in Path(place).resolve().parents:
            if not folder.stat().st_mode & stat.S_IXOTH:
                return str(folder)
    return None


def program_user() -> int | None:
    """Return the number of a user that nobody is, for a program started by root; None for a program
    of anyone else.

    The kernel excepts root from limits, and counts the threads of all programs of one user
    together. In a container with users of its own, root is another of the machine's users.
    """
    if sys.platform != "linux" or os.geteuid() != 0:
        return None
    if Path("/proc/self/uid_map").read_text().split() != _WHOLE_MACHINE:
        return None
    return _UNUSED_USERS[0] + secrets.randbelow(_UNUSED_USERS[1])


def sandbox_command(
    isolate: bool | str,
    readable: Sequence[str],
    file_size: int,
    folder: str,
) -> tuple[list[str], int | None]:
    """Return the command that runs one task in the sandbox that is asked for, and the user for it
    if not this one.

    ConfigError when the sandbox is another program's, which is not installed.
    """
    if isolate not in _PROGRAMS:
        return python_command(), None
    program = shutil.which(_PROGRAMS[str(isolate)])
    if program is None:
        raise ConfigError(
            f"isolate={isolate!r} takes the program {_PROGRAMS[str(isolate)]}, which is not on "
            f"PATH: install it (Debian's package {isolate}), or pass isolate=True, which takes none"
        )
    user = program_user()
    if isolate == "runsc":  # it is to be started by root, and gives the number to the program
        return _runsc(program, readable, file_size, folder, user), None
    return [*_bubblewrap(program, readable, file_size), *python_command()], user


def _bubblewrap(program: str, readable: Sequence[str], file_size: int) -> list[str]:
    """Return bubblewrap's arguments. The first process of its namespace is ours: bubblewrap's
    own could be killed.
    """
    command = [
        program,
        "--unshare-all",
        "--unshare-user",
        "--die-with-parent",
        "--as-pid-1",
        "--cap-drop",
        "ALL",
    ]
    for place in readable:
        if os.path.islink(place):  # noqa: PTH114
            command += ["--symlink", os.readlink(place), place]  # noqa: PTH115
        else:
            command += ["--ro-bind", place, place]
    for device in DEVICES:
        command += ["--dev-bind", device, device]
    command += [
        "--size",
        str(file_size),
        "--perms",
        "0700",
        "--tmpfs",
        FOLDER,
        "--remount-ro",
        "/",
        "--chdir",
        FOLDER,
    ]
    return [*command, "--"]


def _runsc(
    program: str,
    readable: Sequence[str],
    file_size: int,
    folder: str,
    user: int | None,
) -> list[str]:
    """Return runsc's arguments, after the description of the sandbox is written to ``folder``."""
    root = Path(folder, "root")
    own = f"size={file_size}"
    root.mkdir()
    Path(folder).chmod(0o755)  # runsc gives up being root before it opens it
    for place in readable:
        if os.path.islink(place):  # noqa: PTH114
            link = root / place.lstrip("/")
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(os.readlink(place))  # noqa: PTH115
    shown = [place for place in readable if not os.path.islink(place)]  # noqa: PTH114
    mounts = [
        {"destination": it, "type": "bind", "source": it, "options": ["ro", "rbind"]}
        for it in shown
    ]
    # runsc would put a folder there that anybody can fill
    if not any(place.startswith("/tmp/") for place in shown):
        mounts += [{"destination": "/tmp", "type": "tmpfs", "source": "tmpfs", "options": ["ro"]}]
    mounts += [
        {"destination": FOLDER, "type": "tmpfs", "source": "tmpfs", "options": [own, "mode=1777"]}
    ]
    process = {
        "user": {"uid": user or _UNUSED_USERS[0], "gid": user or _UNUSED_USERS[0]},
        "args": python_command(),
        "env": [f"PATH={os.defpath}", f"HOME={FOLDER}", f"TMPDIR={FOLDER}"],
        "cwd": FOLDER,
        "noNewPrivileges": True,
        "capabilities": {},
    }
    namespaces = [{"type": kind} for kind in ("pid", "network", "ipc", "mount", "uts")]
    description = {
        "ociVersion": "1.0.0",
        "process": process,
        "root": {"path": "root", "readonly": True},
        "mounts": mounts,
        "linux": {"namespaces": namespaces},
    }
    Path(folder, "config.json").write_text(json.dumps(description))
    flags = ["--network=none", "--ignore-cgroups", f"--root={folder}/state"]
    if os.geteuid() != 0:
        flags.append("--rootless")
    return [program, *flags, "run", f"--bundle={folder}", Path(folder).name]
