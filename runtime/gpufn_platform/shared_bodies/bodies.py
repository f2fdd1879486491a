"""Shared bodies: large bodies of calls, passed by reference between processes of one host instead of copied.

A shared body is a file in memory (tmpfs), named by its writer. A gateway writes a call's body while it arrives. The
runner links it into the folder of the worker that runs the call. The worker maps the file and reads arrays in place.
Results return the same way, but the gateway reads them instead of mapping them. A worker may truncate its file at any
time, and a process that has mapped the file would then crash. The process that receives a shared body unlinks its name,
and the memory is freed with the last mapping. Each body gets a new file: no process can see a later call through a file
that it still has open or mapped (docs/decisions/0041).

    Home.shared_bodies/<gateway>   bodies written by one gateway, and results for it
                /<worker>    bodies that one worker may see
                /kept        the runner's own: results without a waiting caller, until they are stored
"""

from __future__ import annotations

import contextlib
import mmap
import os
import re
import stat
from collections.abc import Iterable, Iterator
from typing import Final

from gpufn_core.errors import ArtifactUnavailable, CapacityError, GpufnError, ProtocolMismatch
from gpufn_core.ids import new_ulid
from gpufn_core.protocol.limits import LARGE_BODY_BYTES
from gpufn_core.remove_folder import remove_tree

MIN_SHARED_BYTES: Final = 256 << 10  # copying a smaller body takes less time than creating a file
_PART_BYTES: Final = 512 << 10  # read size
_NAME = re.compile(r"[0-9a-z]{26}")


class SharedBodies:
    """The shared bodies in one folder, which is created on the first write."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = os.fspath(folder)

    def make(self) -> None:
        """Create the folder and its parent, accessible only to their owner. Raises CapacityError."""
        with _raising(CapacityError, "cannot store a large body"):
            os.makedirs(os.path.dirname(self.folder), 0o700, exist_ok=True)
            os.makedirs(self.folder, 0o700, exist_ok=True)

    def write(self, parts: Iterable[bytes | memoryview]) -> str:
        """Write the concatenation of `parts`; returns the name. Raises CapacityError when memory is full."""
        with self.writer() as writer:
            for part in parts:
                writer.write(part)
            return writer.keep()

    def writer(self) -> SharedBodyWriter:
        """Open a new shared body for writing. Raises CapacityError."""
        name = new_ulid()
        with _raising(CapacityError, "cannot store a large body"):
            try:
                file = self._create(name)
            except FileNotFoundError:
                self.make()
                file = self._create(name)
        return SharedBodyWriter(self, name, file)

    def take(self, name: str) -> memoryview:
        """Map the bytes read-only, without a copy, and unlink the name. Raises ArtifactUnavailable."""
        view = self.look(name)
        self.remove(name)
        return view

    def look(self, name: str) -> memoryview:
        """Like `take`, but keep the name."""
        file, size = self._open(name)
        try:
            # The reader needs all of it: populating the map at once saves a page fault per 64 KiB.
            flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
            with _raising(ArtifactUnavailable, "cannot read a large body"):  # too many maps or files, or no memory
                return memoryview(mmap.mmap(file, size, flags=flags, prot=mmap.PROT_READ) if size else b"")
        finally:
            os.close(file)

    def reader(self, name: str) -> SharedBodyReader:
        """Open a shared body of an untrusted writer for reading, and unlink its name. Raises ArtifactUnavailable."""
        file, size = self._open(name)
        self.remove(name)
        reader = SharedBodyReader(file, size)
        if size > LARGE_BODY_BYTES:
            reader.close()
            raise ArtifactUnavailable(f"a large body has grown to {size:,} bytes")
        return reader

    def size(self, name: str) -> int:
        """Return the size in bytes. Raises ArtifactUnavailable, or ProtocolMismatch if it is not a regular file."""
        with _raising(ArtifactUnavailable, "a large body is gone"):
            info = os.lstat(self._path(name))
        return _size_of(info)

    def link_into(self, name: str, other: SharedBodies) -> str:
        """Link the body into `other`, whose folder must exist; returns the new name. The old name stays. Raises
        ArtifactUnavailable."""
        linked_name = new_ulid()
        with _raising(ArtifactUnavailable, "a large body is gone"):
            os.link(self._path(name), other._path(linked_name), follow_symlinks=False)
        return linked_name

    def remove(self, name: str) -> None:
        """Unlink a shared body. A missing body is not an error."""
        with contextlib.suppress(OSError):
            os.unlink(self._path(name))

    def remove_all(self) -> None:
        """Remove the folder with everything that the worker created in it, and the parent folder if empty."""
        remove_tree(self.folder)
        with contextlib.suppress(OSError):
            os.rmdir(os.path.dirname(self.folder))

    def _open(self, name: str) -> tuple[int, int]:
        """Open the file; returns the descriptor and the size."""
        with _raising(ArtifactUnavailable, "a large body is gone"):
            file = os.open(self._path(name), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            return file, _size_of(os.fstat(file))
        except ProtocolMismatch:
            os.close(file)
            raise

    def _create(self, name: str) -> int:
        # World-readable, because a worker in a container is another user; it sees only its own folder.
        return os.open(self._path(name), os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)

    def _path(self, name: str) -> str:
        if _NAME.fullmatch(name) is None:
            raise ProtocolMismatch(f"{name[:40]!r} is not the name of a shared body")
        return os.path.join(self.folder, name)


class SharedBodyReader:
    """Reads a shared body of `size` bytes part by part. Close it, or use `with`."""

    def __init__(self, file: int, size: int) -> None:
        self._file = file
        self.size = size

    def parts(self) -> Iterator[bytes]:
        """Yield all parts from the start. Raises ArtifactUnavailable if the file was truncated."""
        offset = 0
        while offset < self.size:
            with _raising(ArtifactUnavailable, "cannot read a large body"):
                part = os.pread(self._file, min(_PART_BYTES, self.size - offset), offset)
            if not part:
                raise ArtifactUnavailable(f"a large body was truncated to {offset:,} of its {self.size:,} bytes")
            offset += len(part)
            yield part

    def close(self) -> None:
        os.close(self._file)

    def __enter__(self) -> SharedBodyReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class SharedBodyWriter:
    """A shared body that is being written; leaving the `with` block removes it unless `keep` was called."""

    def __init__(self, shared_bodies: SharedBodies, name: str, file: int) -> None:
        self._shared_bodies = shared_bodies
        self._name = name
        self._file = file
        self._is_kept = False
        self.size = 0

    def write(self, part: bytes | memoryview) -> None:
        """Append a part. Raises CapacityError when memory is full."""
        remaining = memoryview(part).cast("B")
        while remaining:
            with _raising(CapacityError, "cannot store a large body"):
                written = os.write(self._file, remaining)
            self.size += written
            remaining = remaining[written:]

    def keep(self) -> str:
        """Complete the shared body; returns its name."""
        self._is_kept = True
        return self._name

    def __enter__(self) -> SharedBodyWriter:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._file)
        if not self._is_kept:
            self._shared_bodies.remove(self._name)


@contextlib.contextmanager
def _raising(kind: type[GpufnError], problem: str) -> Iterator[None]:
    """Turn an OSError into a `kind` whose message begins with `problem`."""
    try:
        yield
    except OSError as error:
        raise kind(f"{problem}: {error.strerror}") from error


def _size_of(info: os.stat_result) -> int:
    if not stat.S_ISREG(info.st_mode):
        raise ProtocolMismatch("a shared body must be a regular file")
    return info.st_size
