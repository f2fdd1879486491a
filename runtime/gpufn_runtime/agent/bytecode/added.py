"""Byte code that the agent has added to one unpacked bundle, in the `__pycache__` folders where Python looks for it.

The sandbox lets no worker write there. Functions with `isolation="process"` have no sandbox, so the agent knows the
checksums of what it has written. Byte code is untrusted if an earlier agent has written it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import zlib
from collections.abc import Container, Iterator
from pathlib import Path

_FOLDER = "__pycache__"


class AddedBytecode:
    """`versions` are the versions of Python, such as 3.12, that the bundle was compiled for, or will be."""

    def __init__(self, bundle: Path) -> None:
        self.bundle = bundle
        self.versions: set[str] = set()
        self._checksums: dict[str, int] = {}

    def missing(self, version: str) -> dict[str, int]:
        """Return the sources without byte code for this version, with their sizes. Blocks."""
        sizes = {}
        for folder, folders, files in os.walk(self.bundle):
            folders.sort()
            for name in sorted(files):
                path = os.path.join(folder, name)
                if name.endswith(".py") and not os.path.lexists(_cached(path, version)):
                    with contextlib.suppress(OSError):
                        sizes[os.path.relpath(path, self.bundle)] = os.lstat(path).st_size
        return sizes

    def add(self, source: str, version: str, data: bytes) -> None:
        """Write the byte code of a source. Blocks. Raises OSError, such as when the bundle has been removed."""
        path = Path(_cached(os.fspath(self.bundle / source), version))
        path.parent.mkdir(exist_ok=True)
        # Recorded first: `is_intact` must not doubt a file that it finds meanwhile.
        self._checksums[os.path.relpath(path, self.bundle)] = zlib.crc32(data)
        with self._staging(path.name) as staging:
            with open(staging, "xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())  # Python does not recover from half of a file
            staging.chmod(0o444)
            staging.rename(path)

    @contextlib.contextmanager
    def _staging(self, name: str) -> Iterator[Path]:
        """Yield the path of a file that becomes one of the bundle. It is outside, because a container may be about to
        link each file that is inside."""
        folder = self.bundle.with_name(f".{self.bundle.name}.bytecode")
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        try:
            yield folder / name
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def is_intact(self, archived: Container[str]) -> bool:
        """Return whether each file of byte code is in the archive, or as the agent has written it. Blocks."""
        try:
            return all(
                zlib.crc32((self.bundle / name).read_bytes()) == self._checksums.get(name)
                for name in _names(self.bundle)
                if name not in archived
            )
        except OSError:
            return False

    def remove(self, archived: Container[str]) -> None:
        """Remove all byte code that is not in the archive. Blocks."""
        for name in _names(self.bundle):
            if name not in archived:
                (self.bundle / name).unlink(missing_ok=True)


def _names(bundle: Path) -> Iterator[str]:
    for path in sorted(bundle.rglob(f"{_FOLDER}/*.pyc")):
        yield os.path.relpath(path, bundle)


def _cached(source: str, version: str) -> str:
    """Return the path where CPython looks for the byte code.

    >>> _cached("/b/pkg/mod.py", "3.12")
    '/b/pkg/__pycache__/mod.cpython-312.pyc'
    """
    folder, name = os.path.split(source)
    return os.path.join(folder, _FOLDER, f"{name.removesuffix('.py')}.cpython-{version.replace('.', '')}.pyc")
