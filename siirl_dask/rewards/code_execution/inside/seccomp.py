"""The filter of system calls: a program starts no process and reaches nothing outside its own
memory and files.

The numbers are those of two kinds of machine. libseccomp knows them too, but its Python binding is
in no package that pip could install.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct

from siirl_dask.rewards.code_execution.inside.linux import call

_Rule = tuple[int, int, int, int]
"""An instruction of linux/filter.h: code, jump if true, jump if false, operand."""

_LOAD = 0x20
_AND = 0x54
_EQUAL = 0x15
_ANY_BIT = 0x45
_AT_LEAST = 0x35
_RETURN = 0x06
_ALLOW: _Rule = (_RETURN, 0, 0, 0x7FFF0000)
_REFUSE: _Rule = (_RETURN, 0, 0, 0x00050000 | errno.EPERM)
_UNKNOWN: _Rule = (_RETURN, 0, 0, 0x00050000 | errno.ENOSYS)
_SECCOMP = 22  # linux/prctl.h
_FILTER = 2  # linux/seccomp.h
# Offsets in struct seccomp_data; of arguments the low halves.
_NUMBER = 0
_ARCHITECTURE = 4
_FIRST = 16
_SECOND = 24
_OTHER_NUMBERS = 0x40000000  # x86_64 has a second set of numbers
_CLONE_THREAD = 0x10000
_AF_UNIX = 1
_SOCK_STREAM = 1
# calls that came after the tables below are refused, whatever they do: Linux 5.17 knows no higher
# number
_NEWEST = 450

_MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
_CLONE = (56, 220)
_CLONE3 = (435, 435)
_SOCKETPAIR = (53, 199)
_PRLIMIT = (302, 261)
_KILL = (62, 129)
_TGKILL = (234, 131)
# fork, vfork, unshare, setns, setpgid, setsid, prctl, execve, execveat, ptrace, seccomp
_PROCESSES = (
    *(
        (57, None),
        (58, None),
        (272, 97),
        (308, 268),
        (109, 154),
        (112, 157),
        (157, 167),
        (59, 221),
        (322, 281),
    ),
    *((101, 117), (317, 277)),
)
_REACH = (
    # socket, connect, bind, listen, accept, accept4, io_uring_setup, io_uring_enter,
    # io_uring_register
    *(
        (41, 198),
        (42, 203),
        (49, 200),
        (50, 201),
        (43, 202),
        (288, 242),
        (425, 425),
        (426, 426),
        (427, 427),
    ),
    # shmget, shmat, shmctl, shmdt, msgget, msgsnd, msgrcv, msgctl, semget, semop, semctl,
    # semtimedop
    *(
        (29, 194),
        (30, 196),
        (31, 195),
        (67, 197),
        (68, 186),
        (69, 189),
        (70, 188),
        (71, 187),
        (64, 190),
        (65, 193),
    ),
    *((66, 191), (220, 192)),
    # mq_open, mq_unlink, mq_timedsend, mq_timedreceive, mq_notify, mq_getsetattr
    *((240, 180), (241, 181), (242, 182), (243, 183), (244, 184), (245, 185)),
    # process_vm_readv, process_vm_writev, process_madvise, kcmp, pidfd_open, pidfd_getfd,
    # pidfd_send_signal
    *((310, 270), (311, 271), (440, 440), (312, 272), (434, 434), (438, 438), (424, 424)),
    *((200, 130), (129, 138), (297, 240)),  # and tkill, rt_sigqueueinfo, rt_tgsigqueueinfo
    # keyctl, add_key, request_key, bpf, userfaultfd, perf_event_open, memfd_create, memfd_secret
    *(
        (250, 219),
        (248, 217),
        (249, 218),
        (321, 280),
        (323, 282),
        (298, 241),
        (319, 279),
        (447, 447),
    ),
    # mount, umount2, pivot_root, chroot, mount_setattr, move_mount, open_tree, fsopen, fsconfig,
    # fsmount, fspick
    *(
        (165, 40),
        (166, 39),
        (155, 41),
        (161, 51),
        (442, 442),
        (429, 429),
        (428, 428),
        (430, 430),
        (431, 431),
    ),
    *((432, 432), (433, 433)),
    # open_by_handle_at, name_to_handle_at, fanotify_init, fanotify_mark, inotify_init,
    # inotify_init1
    *((304, 265), (303, 264), (300, 262), (301, 263), (253, None), (294, 26)),
    # kexec_load, kexec_file_load, init_module, finit_module, delete_module, reboot, swapon,
    # swapoff, acct, syslog
    *(
        (246, 104),
        (320, 294),
        (175, 105),
        (313, 273),
        (176, 106),
        (169, 142),
        (167, 224),
        (168, 225),
        (163, 89),
    ),
    *((103, 116), (179, 60), (443, 443)),  # and quotactl, quotactl_fd
    # iopl, ioperm, modify_ldt, personality, vhangup, settimeofday, clock_settime, clock_adjtime,
    # adjtimex
    *(
        (172, None),
        (173, None),
        (154, None),
        (135, 92),
        (153, 58),
        (164, 170),
        (227, 112),
        (305, 266),
        (159, 171),
    ),
    # move_pages, migrate_pages, remap_file_pages, vmsplice, ioprio_set
    *((279, 239), (256, 238), (216, 234), (278, 75), (251, 30)),
)


def install_filter(*, confined: bool) -> None:
    """Forbid this process to start others, so that killing it leaves nothing over; ``confined``
    also forbids all that reaches out of it: sockets, shared memory and queues of the system,
    mounts, other processes, keys, io_uring.

    OSError when a confined process runs on a machine whose call numbers are not listed; others then
    get no filter.
    """
    name = os.uname().machine
    if name not in _MACHINES:
        if confined:
            raise OSError(
                f"no filter of system calls for {name} (there is one for {', '.join(_MACHINES)})"
            )
        return
    rules = _rules(*_MACHINES[name], confined)
    packed = b"".join(
        struct.pack("=HBBI", code, if_true, if_false, operand)
        for code, if_true, if_false, operand in rules
    )
    program = ctypes.create_string_buffer(packed)
    call("prctl", _SECCOMP, _FILTER, struct.pack("@HP", len(rules), ctypes.addressof(program)))


def _rules(column: int, architecture: int, confined: bool) -> list[_Rule]:
    rules = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_EQUAL, 1, 0, architecture),
        _REFUSE,
        (_LOAD, 0, 0, _NUMBER),
    ]
    rules += [(_AT_LEAST, 0, 1, _OTHER_NUMBERS), _REFUSE]
    refused = [*_PROCESSES]
    if confined:
        rules += [(_AT_LEAST, 0, 1, _NEWEST + 1), _UNKNOWN]
        refused += _REACH
    for numbers in refused:
        rules += _on(numbers[column], [_REFUSE])
    # a filter cannot see its flags; clone's it can, and the C library falls back
    rules += _on(_CLONE3[column], [_UNKNOWN])
    thread = (_ANY_BIT, 1, 0, _CLONE_THREAD)
    rules += _on(_CLONE[column], [(_LOAD, 0, 0, _FIRST), thread, _REFUSE, _ALLOW])
    # a pair is what asyncio wakes itself with; one of datagrams could send to any address
    if confined:
        rules += _on(
            _SOCKETPAIR[column],
            [
                (_LOAD, 0, 0, _FIRST),
                (_EQUAL, 1, 0, _AF_UNIX),
                _REFUSE,
                (_LOAD, 0, 0, _SECOND),
                (_AND, 0, 0, 0xF),
                (_EQUAL, 1, 0, _SOCK_STREAM),
                _REFUSE,
                _ALLOW,
            ],
        )
        for call_numbers in (_KILL, _TGKILL):  # only itself, as abort() does
            itself = (_EQUAL, 1, 0, os.getpid())
            rules += _on(call_numbers[column], [(_LOAD, 0, 0, _FIRST), itself, _REFUSE, _ALLOW])
        # only its own limits
        itself = (_EQUAL, 1, 0, 0)
        rules += _on(_PRLIMIT[column], [(_LOAD, 0, 0, _FIRST), itself, _REFUSE, _ALLOW])
    return [*rules, _ALLOW]


def _on(number: int | None, rules: list[_Rule]) -> list[_Rule]:
    """Return the rules of one call, the last of which returns; none where the machine does not
    have the call.
    """
    if number is None:
        return []
    return [(_EQUAL, 0, len(rules), number), *rules]
