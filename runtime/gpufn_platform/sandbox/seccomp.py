"""The seccomp filter: a BPF program that allows the system calls of Docker's default profile. Pure.

Calls that change another process are refused too: workers that are forked from one template share a PID namespace, and
some kernels allow none.

Refused calls fail with EPERM. Calls that are newer than the table fail with ENOSYS, so that programs use older ones.
The data is in `system_calls.txt`.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Iterable, Iterator
from importlib import resources
from typing import Final

_ARCHITECTURES: Final = {"x86_64": (1, 0xC000003E), "aarch64": (2, 0xC00000B7)}  # column, AUDIT_ARCH_*
# Numbers of the calls with conditions on their arguments.
_CLONE: Final = {"x86_64": 56, "aarch64": 220}
_SOCKET: Final = {"x86_64": 41, "aarch64": 198}
_SOCKETPAIR: Final = {"x86_64": 53, "aarch64": 199}
_PERSONALITY: Final = {"x86_64": 135, "aarch64": 92}
_CLONE3: Final = 435
# Calls that set up the sandbox of a worker: its template is allowed to make them.
SETUP_CALLS: Final = {
    "x86_64": {"unshare": 272, "setns": 308, "mount": 165, "umount2": 166, "pivot_root": 155},
    "aarch64": {"unshare": 97, "setns": 268, "mount": 40, "umount2": 39, "pivot_root": 41},
}
_SETUP_CALLS_OF_BOTH: Final = (428, 429, 442)  # open_tree, move_mount, mount_setattr

_NAMESPACES: Final = 0x7E020000  # CLONE_NEW*
_PERSONALITIES: Final = (0, 8, 0x20000, 0x20008, 0xFFFFFFFF)
# Docker allows more. Some of the others, such as TIPC, connect the processes of a network namespace to each other,
# which workers with `network="egress"` share, and nftables does not see them.
_UNIX, _INTERNET, _NETLINK = 1, (2, 10), 16
_NETLINK_USERSOCK: Final = 2  # messages between processes
# Calls that change limits or priority of a process, with the first arguments that mean the caller itself. The kernel
# only compares users. `sched_setaffinity` is not in the table: the C library calls it with the id of a thread.
_OF_ITSELF: Final = {
    "prlimit64": (0,),
    "sched_setattr": (0,),
    "sched_setparam": (0,),
    "sched_setscheduler": (0,),
    "setpriority": (0, 0),  # PRIO_PROCESS
    "ioprio_set": (1, 0),  # IOPRIO_WHO_PROCESS
}

_EPERM, _ENOSYS, _EAFNOSUPPORT = 1, 38, 97
_ALLOW: Final = 0x7FFF0000
_ERRNO: Final = 0x00050000
_LOAD, _AND, _RETURN = 0x20, 0x54, 0x06
_JUMP_EQUAL, _JUMP_GREATER, _JUMP_GREATER_OR_EQUAL = 0x15, 0x25, 0x35
# Offsets in struct seccomp_data. Both architectures are little-endian.
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT, _ARGUMENT_BYTES = 0, 4, 16, 8

_Step = tuple[int, int, int, int]  # code, steps to skip if true, if false, operand


def is_supported(machine: str) -> bool:
    return machine in _ARCHITECTURES


@functools.cache
def program(machine: str, *, may_set_up: bool) -> bytes:
    """Return the program for `machine`, as `os.uname()` names it; empty if there is none. `may_set_up`: allow
    SETUP_CALLS."""
    if not is_supported(machine):
        return b""
    _, architecture = _ARCHITECTURES[machine]
    numbers = set(allowed_calls(machine).values())
    newest = max(numbers)
    if may_set_up:
        numbers |= {*SETUP_CALLS[machine].values(), *_SETUP_CALLS_OF_BOTH}
    steps: list[_Step] = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_JUMP_EQUAL, 1, 0, architecture),
        _error(_ENOSYS),
        (_LOAD, 0, 0, _NUMBER),
        *_if_equal(_CLONE3, [_error(_ENOSYS)]),
        (_JUMP_GREATER, 0, 1, newest),
        _error(_ENOSYS),
        *_if_equal(
            _CLONE[machine],
            [
                (_LOAD, 0, 0, _FIRST_ARGUMENT),
                (_AND, 0, 0, _NAMESPACES),
                (_JUMP_EQUAL, 1, 0, 0),
                _error(_EPERM),
                (_RETURN, 0, 0, _ALLOW),
            ],
        ),
        *_if_equal(_SOCKET[machine], _sockets()),
        *_if_equal(_SOCKETPAIR[machine], _sockets()),
        *_if_equal(
            _PERSONALITY[machine],
            [
                (_LOAD, 0, 0, _FIRST_ARGUMENT),
                *(step for each in _PERSONALITIES for step in _if_equal(each, [(_RETURN, 0, 0, _ALLOW)])),
                _error(_EPERM),
            ],
        ),
    ]
    for name, arguments in _OF_ITSELF.items():
        steps += _if_equal(allowed_calls(machine)[name], list(_allow_with(arguments)))
    for first, last in _ranges(numbers):
        steps += [
            (_JUMP_GREATER_OR_EQUAL, 1, 0, first),
            _error(_EPERM),
            (_JUMP_GREATER, 1, 0, last),
            (_RETURN, 0, 0, _ALLOW),
        ]
    steps.append(_error(_EPERM))
    return b"".join(struct.pack("HBBI", *step) for step in steps)


@functools.cache
def allowed_calls(machine: str) -> dict[str, int]:
    """Return the numbers of the calls that are allowed without conditions, by name."""
    column, _ = _ARCHITECTURES[machine]
    text = resources.files("gpufn_platform.sandbox").joinpath("system_calls.txt").read_text()
    rows = [line.split() for line in text.splitlines() if not line.startswith("#")]
    return {row[0]: int(row[column]) for row in rows if row[column] != "-"}


def _error(number: int) -> _Step:
    return _RETURN, 0, 0, _ERRNO | number


def _sockets() -> list[_Step]:
    """Allow the families of sockets that programs use."""
    return [
        (_LOAD, 0, 0, _FIRST_ARGUMENT),
        *(step for family in (_UNIX, *_INTERNET) for step in _if_equal(family, [(_RETURN, 0, 0, _ALLOW)])),
        *_if_equal(
            _NETLINK,
            [
                (_LOAD, 0, 0, _FIRST_ARGUMENT + 2 * _ARGUMENT_BYTES),
                *_if_equal(_NETLINK_USERSOCK, [_error(_EPERM)]),
                (_RETURN, 0, 0, _ALLOW),
            ],
        ),
        _error(_EAFNOSUPPORT),
    ]


def _allow_with(arguments: Iterable[int]) -> Iterator[_Step]:
    """Allow the call with these first arguments only."""
    for place, value in enumerate(arguments):
        yield _LOAD, 0, 0, _FIRST_ARGUMENT + place * _ARGUMENT_BYTES
        yield _JUMP_EQUAL, 1, 0, value
        yield _error(_EPERM)
    yield _RETURN, 0, 0, _ALLOW


def _if_equal(operand: int, steps: list[_Step]) -> list[_Step]:
    return [(_JUMP_EQUAL, 0, len(steps), operand), *steps]


def _ranges(numbers: Iterable[int]) -> Iterator[tuple[int, int]]:
    """
    >>> list(_ranges({5, 0, 1, 2}))
    [(0, 2), (5, 5)]
    """
    numbers = set(numbers)
    firsts = sorted(number for number in numbers if number - 1 not in numbers)
    lasts = sorted(number for number in numbers if number + 1 not in numbers)
    return zip(firsts, lasts, strict=True)
