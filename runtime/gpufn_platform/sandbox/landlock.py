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


class Ruleset:
    """Rules that a process collects and then restricts itself to. Without Landlock, it has none. The methods raise
    OSError."""

    def __init__(self, *, limits_files: bool = True) -> None:
        abi = system_calls.landlock_abi()
        scopes = _SCOPES if abi >= SCOPES_ABI else 0
        self._files = (1 << _RIGHTS_BY_ABI.get(abi, 16)) - 1 if limits_files and abi else 0
        self._fd = system_calls.landlock_create_ruleset(self._files, scopes) if self._files or scopes else None

    def allow(self, rules: Iterable[tuple[str, Access]], root: str = "") -> None:
        """Add rules for paths below `root`, which becomes the root later."""
        if self._fd is not None and self._files:
            for path, access in rules:
                _allow(self._fd, root + path, access, self._files)

    def restrict(self) -> None:
        """Limit this process to the accesses that the rules allow."""
        if self._fd is not None:
            try:
                system_calls.landlock_restrict_self(self._fd)
            finally:
                os.close(self._fd)


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
