"""Read and write files of clients in /dev/shm, which a client may exchange, truncate or remove at any time.

Nothing is mapped: a process that has mapped a file dies with SIGBUS if another process truncates it. Each use opens the
file by its plain name and checks it again, so no descriptor keeps the memory of a removed file.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from gpufn_core.errors import CapacityError, InvalidInput

FOLDER: Final = Path("/dev/shm")  # noqa: S108  where shm_open has its files
_PLAIN: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,199}")
_FLAGS: Final = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_READS: Final = os.O_RDONLY | _FLAGS
_WRITES: Final = os.O_RDWR | _FLAGS


class Identity(NamedTuple):
    """A file, whatever its name is."""

    device: int
    inode: int


class ClientFiles:
    """The files of clients: regular files of the user `uid`, whose names begin with a prefix."""

    def __init__(self, uid: int, folder: Path = FOLDER) -> None:
        self._uid = uid
        self._folder = os.fspath(folder)

    def identify(self, key: str, prefix: str, end: int) -> Identity:
        """Return the file of a key, which has at least `end` bytes. Raises InvalidInput."""
        with self._opened(_checked_name(key, prefix), None, end, _WRITES) as file:
            return _identity(os.fstat(file))

    def read_into(self, buffer: memoryview, key: str, identity: Identity, offset: int) -> None:
        """Fill a buffer with the bytes at an offset. Raises InvalidInput if the file has changed or is too short."""
        with self._opened(_name(key), identity, offset + len(buffer), _READS) as file:
            remaining = buffer
            while remaining:
                count = os.preadv(file, [remaining], offset)
                if not count:
                    raise _changed("it is shorter than its region")
                offset += count
                remaining = remaining[count:]

    def write(self, part: bytes | memoryview, key: str, identity: Identity, offset: int) -> None:
        """Write bytes at an offset. Raises InvalidInput if the file has changed or is too short, and CapacityError if
        there is no memory."""
        remaining = memoryview(part).cast("B")
        with self._opened(_name(key), identity, offset + len(remaining), _WRITES) as file:
            while remaining:
                try:
                    count = os.pwrite(file, remaining, offset)
                except OSError as error:
                    raise CapacityError(f"An output cannot be written to its region: {error.strerror}.") from None
                offset += count
                remaining = remaining[count:]

    @contextlib.contextmanager
    def _opened(self, name: str, identity: Identity | None, end: int, flags: int) -> Iterator[int]:
        """Open a file that has `end` bytes. Raises InvalidInput, which does not reveal whether a foreign file
        exists."""
        try:
            file = os.open(f"{self._folder}/{name}", flags)
        except (OSError, ValueError):  # a name with a null byte
            raise _changed("there is no such file that the platform may use") from None
        try:
            info = os.fstat(file)
            is_usable = stat.S_ISREG(info.st_mode) and info.st_uid == self._uid and info.st_nlink == 1
            if not is_usable:
                raise _changed("there is no such file that the platform may use")
            if identity is not None and _identity(info) != identity:
                raise _changed("it is another file than the one that was registered")
            if info.st_size < end:
                raise _changed("it is shorter than its region")
            yield file
        finally:
            os.close(file)


def _checked_name(key: str, prefix: str) -> str:
    """Return the file name of a key. Raises InvalidInput unless it is a plain name with the prefix."""
    name = _name(key)
    if not (name.startswith(prefix) and len(name) > len(prefix) and _PLAIN.fullmatch(name)):
        raise InvalidInput(
            f"the key of a region must begin with {prefix!r}, and have only letters, digits, '.', '_' and '-'",
            field="key",
        )
    return name


def _name(key: str) -> str:
    return key.removeprefix("/")  # as for shm_open


def _identity(info: os.stat_result) -> Identity:
    return Identity(info.st_dev, info.st_ino)


def _changed(reason: str) -> InvalidInput:
    return InvalidInput(f"the memory of the region cannot be used: {reason}; create it and register it again")
