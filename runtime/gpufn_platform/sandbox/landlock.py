"""Landlock: which files a process may use, and that it may signal no process outside its sandbox."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterable
from typing import Final

from gpufn_platform.sandbox import system_calls
from gpufn_platform.sandbox.layout import Access

FILES_ABI: Final = 1
SCOPES_ABI: Final = 6  # signals and abstract unix sockets

_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1, 2, 4, 8
_TRUNCATE, _IOCTL_DEV = 1 << 14, 1 << 15
_OF_FILES: Final = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL_DEV
_READ: Final = _EXECUTE | _READ_FILE | _READ_DIR
_ALL: Final = (1 << 16) - 1
_SCOPES: Final = 0b11
_RIGHTS_BY_ABI: Final = {1: 13, 2: 14, 3: 15, 4: 15}  # number of file rights; 16 from version 5 on


def restrict(rules: Iterable[tuple[str, Access]] | None) -> None:
    """Allow this process only what `rules` allow; None does not limit files. Without Landlock, do nothing. Raises
    OSError."""
    abi = system_calls.landlock_abi()
    scopes = _SCOPES if abi >= SCOPES_ABI else 0
    files = 0 if rules is None or not abi else (1 << _RIGHTS_BY_ABI.get(abi, 16)) - 1
    if not (files or scopes):
        return
    ruleset = system_calls.landlock_create_ruleset(files, scopes)
    try:
        for path, access in (rules or ()) if files else ():
            _allow(ruleset, path, access, files)
        system_calls.landlock_restrict_self(ruleset)
    finally:
        os.close(ruleset)


def _allow(ruleset: int, path: str, access: Access, handled: int) -> None:
    try:
        fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return
    try:
        rights = _rights(access) & handled
        if not stat.S_ISDIR(os.fstat(fd).st_mode):
            rights &= _OF_FILES
        system_calls.landlock_allow(ruleset, fd, rights)
    except OSError as error:
        if error.errno != errno.EBADFD:  # a link such as /dev/stdin may lead to a pipe, which needs no rule
            raise
    finally:
        os.close(fd)


def _rights(access: Access) -> int:
    return {
        Access.READ: _READ,
        Access.OVERWRITE: _READ | _WRITE_FILE | _TRUNCATE,
        Access.BY_NAME: _ALL & ~_READ_DIR,
        Access.ALL: _ALL,
    }[access]
