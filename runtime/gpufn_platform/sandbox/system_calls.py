"""The system calls of the sandbox, by ctypes. Each raises OSError."""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Mapping
from typing import Any, Final

CLONE_NEWNS: Final = 0x00020000
CLONE_NEWIPC: Final = 0x08000000
CLONE_NEWUSER: Final = 0x10000000
CLONE_NEWPID: Final = 0x20000000
CLONE_NEWNET: Final = 0x40000000

MS_RDONLY: Final = 1
MS_NOSUID: Final = 2
MS_NODEV: Final = 4
MS_NOEXEC: Final = 8
MS_REMOUNT: Final = 32
MS_REC: Final = 0x4000
MS_PRIVATE: Final = 1 << 18
MNT_DETACH: Final = 2

MOUNT_READ_ONLY: Final = 1  # MOUNT_ATTR_*
MOUNT_NO_SUID: Final = 2

# The numbers of calls that the C library may not know. They are the same on all architectures.
_OPEN_TREE, _MOVE_MOUNT, _FSOPEN, _FSCONFIG, _FSMOUNT, _MOUNT_SETATTR = 428, 429, 430, 431, 432, 442
_LANDLOCK_CREATE_RULESET, _LANDLOCK_ADD_RULE, _LANDLOCK_RESTRICT_SELF = 444, 445, 446
_AT_FDCWD: Final = -100
_AT_EMPTY_PATH, _AT_RECURSIVE = 0x1000, 0x8000
_OPEN_TREE_CLONE: Final = 1
_FSOPEN_CLOEXEC, _FSMOUNT_CLOEXEC = 1, 1
_FSCONFIG_SET_STRING, _FSCONFIG_CMD_CREATE = 1, 6
_MOVE_MOUNT_F_EMPTY_PATH: Final = 4
_LANDLOCK_VERSION: Final = 1
_LANDLOCK_RULE_PATH_BENEATH: Final = 1

_PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 24, 38, 22, 2
_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL = 47, 4
_CAPABILITY_VERSION_3: Final = 0x20080522
_LAST_CAPABILITY: Final = 63

_libc = ctypes.CDLL(None, use_errno=True)
_syscall = _libc.syscall
_syscall.restype = ctypes.c_long


def unshare(flags: int) -> None:
    _check(_libc.unshare(flags), "unshare")


def enter_namespace(descriptor: int, kind: int) -> None:
    _check(_libc.setns(descriptor, kind), "setns")


def enter_network_namespace(path: str) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        _check(_libc.setns(fd, CLONE_NEWNET), path)
    finally:
        os.close(fd)


def mount(source: str, target: str, kind: str | None, flags: int, data: str = "") -> None:
    kind_bytes = None if kind is None else kind.encode()
    _check(
        _libc.mount(os.fsencode(source), os.fsencode(target), kind_bytes, ctypes.c_ulong(flags), data.encode()), target
    )


def clone_mounts(path: str) -> int:
    """Return a descriptor of a copy of the mount at `path`, from there downwards, that is attached nowhere."""
    flags = _OPEN_TREE_CLONE | _AT_RECURSIVE | os.O_CLOEXEC
    return _check(_call(_OPEN_TREE, _AT_FDCWD, os.fsencode(path), flags), path)


def new_file_system(kind: str, options: Mapping[str, str]) -> int:
    """Return a descriptor of a mount of a new file system that is attached nowhere."""
    context = _check(_call(_FSOPEN, kind.encode(), _FSOPEN_CLOEXEC), kind)
    try:
        for name, value in options.items():
            _check(_call(_FSCONFIG, context, _FSCONFIG_SET_STRING, name.encode(), value.encode(), 0), name)
        _check(_call(_FSCONFIG, context, _FSCONFIG_CMD_CREATE, None, None, 0), kind)
        return _check(_call(_FSMOUNT, context, _FSMOUNT_CLOEXEC, 0), kind)
    finally:
        os.close(context)


def set_mount_attributes(mounts: int | str, attributes: int, *, recursive: bool = True) -> None:
    attr = struct.pack("QQQQ", attributes, 0, 0, 0)
    folder, path = (mounts, b"") if isinstance(mounts, int) else (_AT_FDCWD, os.fsencode(mounts))
    flags = (_AT_EMPTY_PATH if isinstance(mounts, int) else 0) | (_AT_RECURSIVE if recursive else 0)
    _check(_call(_MOUNT_SETATTR, folder, path, flags, attr, len(attr)), "mount_setattr")


def attach_mounts(mounts: int, target: str) -> None:
    _check(_call(_MOVE_MOUNT, mounts, b"", _AT_FDCWD, os.fsencode(target), _MOVE_MOUNT_F_EMPTY_PATH), target)


def pivot_root(new: str, old: str) -> None:
    _check(_libc.pivot_root(os.fsencode(new), os.fsencode(old)), "pivot_root")


def unmount(target: str) -> None:
    _check(_libc.umount2(os.fsencode(target), MNT_DETACH), target)


def bound_capabilities(keep: frozenset[int]) -> None:
    """Let no program that this process starts gain a capability but `keep`."""
    for number in range(_LAST_CAPABILITY + 1):
        if number not in keep and _libc.prctl(_PR_CAPBSET_DROP, number, 0, 0, 0) != 0:
            break  # the kernel has no further capability, or this process may not drop any
    _libc.prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0)


def drop_capabilities(keep: frozenset[int]) -> None:
    """Drop all capabilities of this process but `keep`."""
    mask = sum(1 << number for number in keep)
    header = struct.pack("Ii", _CAPABILITY_VERSION_3, 0)
    low, high = mask & 0xFFFFFFFF, mask >> 32
    _check(_libc.capset(header, struct.pack("6I", low, low, 0, high, high, 0)), "capset")


def set_no_new_privileges() -> None:
    _check(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")


def set_seccomp_filter(program: bytes) -> None:
    address = ctypes.cast(ctypes.c_char_p(program), ctypes.c_void_p).value
    header = struct.pack("HxxxxxxQ", len(program) // 8, address)
    _check(_libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, header, 0, 0), "seccomp")


def landlock_abi() -> int:
    """Return the version of Landlock; 0 without it."""
    return max(0, _call(_LANDLOCK_CREATE_RULESET, None, 0, _LANDLOCK_VERSION))


def landlock_create_ruleset(files: int, scopes: int) -> int:
    attr = struct.pack("QQQ", files, 0, scopes)
    size = len(attr) if scopes else 8  # older kernels accept the fields that they know
    return _check(_call(_LANDLOCK_CREATE_RULESET, attr, size, 0), "landlock_create_ruleset")


def landlock_allow(ruleset: int, path: int, access: int) -> None:
    rule = struct.pack("=Qi", access, path)
    _check(_call(_LANDLOCK_ADD_RULE, ruleset, _LANDLOCK_RULE_PATH_BENEATH, rule, 0), "landlock_add_rule")


def landlock_restrict_self(ruleset: int) -> None:
    _check(_call(_LANDLOCK_RESTRICT_SELF, ruleset, 0), "landlock_restrict_self")


def _call(number: int, *arguments: Any) -> int:
    # Without the conversion ctypes passes 32 bits, and a variadic function reads 64.
    return int(_syscall(number, *(ctypes.c_long(each) if isinstance(each, int) else each for each in arguments)))


def _check(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), what)
    return result
