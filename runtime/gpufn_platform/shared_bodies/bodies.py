"""Parcels: large bodies of calls, handed on by reference between processes of one host instead of copied.

A parcel is a file in memory (tmpfs), named by its writer. A gateway writes a call's body while it arrives; the runner
links it into the folder of the worker that runs the call; the worker maps it and reads arrays in place. Results come
back the same way, and the gateway reads them: a worker may cut its file short at any time, and who has mapped it then
dies of it. Whoever takes a parcel removes its name; when the last map of it is gone, the memory is free, or its
writer's to write again (`gpufn_platform.shared_bodies.reuse`).

    Home.parcels/<gateway>   what one gateway wrote, and results for it
                /<worker>    what one worker may see
                /kept        the runner's own: results that nobody waits for, until they are stored
"""

from __future__ import annotations

import contextlib
import mmap
import os
import re
import stat
from collections.abc import Iterable, Iterator
from typing import Final

from gpufn_core.errors import ArtifactUnavailable, CapacityError, ProtocolMismatch
from gpufn_core.ids import new_ulid
from gpufn_core.protocol.limits import PARCEL_BYTES
from gpufn_core.remove_folder import remove_tree
from gpufn_platform.shared_bodies.reuse import Spares

LEAST_BYTES: Final = 256 << 10  # what is smaller is copied in less time than a file is made
_PART_BYTES: Final = 512 << 10  # read at a time
_NAME = re.compile(r"[0-9a-z]{26}")


class Parcels:
    """The parcels in one folder, which is made when one is written. With `spare_bytes`, files that nobody needs any
    more are written again; whoever asks for that drops the `spares` when they are of no use."""

    def __init__(self, folder: str | os.PathLike[str], *, spare_bytes: int = 0) -> None:
        self.folder = os.fspath(folder)
        self.spares = Spares(self.folder, spare_bytes)

    def make(self) -> None:
        """The folder, and the one that it is in, for their owner only. Raises CapacityError."""
        try:
            os.makedirs(os.path.dirname(self.folder), 0o700, exist_ok=True)
            os.makedirs(self.folder, 0o700, exist_ok=True)
        except OSError as error:
            raise CapacityError(f"a large body cannot be kept: {error.strerror}") from error

    def write(self, parts: Iterable[bytes | memoryview], readers: str = "") -> str:
        """A new parcel of `parts`, one after the other; its name. Raises CapacityError when memory is full."""
        with self.writer(readers) as writer:
            for part in parts:
                writer.write(part)
            return writer.keep()

    def writer(self, readers: str = "") -> ParcelWriter:
        """`readers` names all who may read what is written. Raises CapacityError."""
        spare = self.spares.take(readers)
        if spare is not None:
            return ParcelWriter(self, *spare, readers)
        name = new_ulid()
        try:
            try:
                file = self._create(name)
            except FileNotFoundError:
                self.make()
                file = self._create(name)
        except OSError as error:
            raise CapacityError(f"a large body cannot be kept: {error.strerror}") from error
        return ParcelWriter(self, name, file, readers)

    def take(self, name: str) -> memoryview:
        """The parcel's bytes, read-only and not copied, and its name is gone. Raises ArtifactUnavailable."""
        view = self.look(name)
        self.remove(name)
        return view

    def look(self, name: str) -> memoryview:
        """As `take`, and the name stays."""
        file, size = self._open(name)
        try:
            if not size:
                return memoryview(b"")
            # All of it is going to be read: to be told so at once saves the kernel a page fault for each 64 KiB.
            flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
            return memoryview(mmap.mmap(file, size, flags=flags, prot=mmap.PROT_READ))
        except OSError as error:  # this process has too many maps or files, or no memory
            raise ArtifactUnavailable(f"a large body cannot be read: {error.strerror}") from error
        finally:
            os.close(file)

    def reader(self, name: str) -> ParcelReader:
        """Of a parcel whose writer is not trusted; its name is gone. Raises ArtifactUnavailable."""
        file, size = self._open(name)
        self.remove(name)
        reader = ParcelReader(file, size)
        if size > PARCEL_BYTES:
            reader.close()
            raise ArtifactUnavailable(f"a large body has grown to {size:,} bytes")
        return reader

    def size(self, name: str) -> int:
        """In bytes. Raises ArtifactUnavailable, ProtocolMismatch for what is no file."""
        try:
            found = os.lstat(self._path(name))
        except OSError as error:
            raise ArtifactUnavailable(f"a large body is gone: {error.strerror}") from error
        if not stat.S_ISREG(found.st_mode):
            raise ProtocolMismatch("a parcel is a file")
        return found.st_size

    def hand_on(self, name: str, other: Parcels) -> str:
        """Another name for the parcel, in `other`, whose folder is there; ours stays. Raises ArtifactUnavailable."""
        theirs = new_ulid()
        try:
            os.link(self._path(name), other._path(theirs), follow_symlinks=False)
        except OSError as error:
            raise ArtifactUnavailable(f"a large body is gone: {error.strerror}") from error
        if not os.path.lexists(self._path(name)):  # since when? Its writer may be writing it again
            other.remove(theirs)
            raise ArtifactUnavailable("a large body is gone")
        return theirs

    def remove(self, name: str) -> None:
        """Absent is fine."""
        with contextlib.suppress(OSError):
            os.unlink(self._path(name))

    def remove_all(self) -> None:
        """The folder with all that is in it, whatever its worker has made there; and the one that it is in, when that
        is empty then."""
        remove_tree(self.folder)
        with contextlib.suppress(OSError):
            os.rmdir(os.path.dirname(self.folder))

    def _open(self, name: str) -> tuple[int, int]:
        """The file, and its size."""
        try:
            file = os.open(self._path(name), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            raise ArtifactUnavailable(f"a large body is gone: {error.strerror}") from error
        found = os.fstat(file)
        if not stat.S_ISREG(found.st_mode):
            os.close(file)
            raise ProtocolMismatch("a parcel is a file")
        return file, found.st_size

    def _publish(self, name: str, file: int, size: int, readers: str) -> str:
        """What to call a file that is written: a name of its own, where the file may be written again. Raises
        CapacityError."""
        told = name
        try:
            os.ftruncate(file, size)  # it may have been longer before
            if self.spares.are_kept:
                told = new_ulid()
                os.link(self._path(name), self._path(told), follow_symlinks=False)
        except OSError as error:
            raise CapacityError(f"a large body cannot be kept: {error.strerror}") from error
        if told != name:
            self.spares.add(name, size, readers)
        return told

    def _create(self, name: str) -> int:
        # For all to read: a worker in a container is another user, and sees its own folder only; others see none.
        return os.open(self._path(name), os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)

    def _path(self, name: str) -> str:
        if _NAME.fullmatch(name) is None:
            raise ProtocolMismatch(f"{name[:40]!r} is not the name of a parcel")
        return os.path.join(self.folder, name)


class ParcelReader:
    """A parcel of `size` bytes that is read part by part; close it, or use `with`."""

    def __init__(self, file: int, size: int) -> None:
        self._file = file
        self.size = size

    def parts(self) -> Iterator[bytes]:
        """All of it, from the start. Raises ArtifactUnavailable when it has been cut short."""
        at = 0
        while at < self.size:
            try:
                part = os.pread(self._file, min(_PART_BYTES, self.size - at), at)
            except OSError as error:
                raise ArtifactUnavailable(f"a large body cannot be read: {error.strerror}") from error
            if not part:
                raise ArtifactUnavailable(f"a large body was cut short: {at:,} of its {self.size:,} bytes are there")
            at += len(part)
            yield part

    def close(self) -> None:
        os.close(self._file)

    def __enter__(self) -> ParcelReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class ParcelWriter:
    """A parcel that is being written; on the way out it is removed unless it was kept."""

    def __init__(self, parcels: Parcels, name: str, file: int, readers: str) -> None:
        self._parcels = parcels
        self._readers = readers
        self._name = name
        self._file = file
        self._is_kept = False
        self.size = 0

    def write(self, part: bytes | memoryview) -> None:
        """Raises CapacityError when memory is full."""
        left = memoryview(part).cast("B")
        while left:
            try:
                written = os.write(self._file, left)
            except OSError as error:
                if self._parcels.spares.drop():
                    continue
                raise CapacityError(f"a large body cannot be kept: {error.strerror}") from error
            self.size += written
            left = left[written:]

    def keep(self) -> str:
        """The parcel is whole; its name. Raises CapacityError."""
        name = self._parcels._publish(self._name, self._file, self.size, self._readers)
        self._is_kept = True
        return name

    def __enter__(self) -> ParcelWriter:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._file)
        if not self._is_kept:
            self._parcels.remove(self._name)
