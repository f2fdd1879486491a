"""Upload of a file or a folder to a volume.

1. list the files; a link that leaves the folder is refused
2. hash them, and send the files that the platform lacks, several at a time
3. commit, which publishes all of them at once

After an interruption, step 2 sends only the rest.
"""

from __future__ import annotations

import hashlib
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

from gpufn.volumes.links import is_inside
from gpufn.volumes.progress import SILENT, Progress
from gpufn_core.errors import InvalidInput
from gpufn_core.spec.file_tree import check_path
from gpufn_core.spec.volume_spec import EXECUTABLE, MODE, VolumeFile, VolumeVersion

THREADS = 4
_CHUNK_BYTES = 1 << 20
_ASKED_AT_ONCE = 1000


class Api(Protocol):
    """The part of the Client that an upload needs."""

    def missing_volume_files(self, name: str, digests: Sequence[str]) -> list[str]: ...
    def put_volume_file(self, name: str, digest: str, chunks: Iterable[bytes], size: int) -> None: ...
    def commit_volume(
        self, name: str, put: Iterable[VolumeFile] = (), remove: Iterable[str] = (), *, base: int | None = None
    ) -> VolumeVersion: ...


def put_files(
    api: Api, name: str, source: Path, to: str = "", *, replace: bool = False, progress: Progress | None = None
) -> VolumeVersion:
    """Copy a file or a folder into a volume. Raises InvalidInput for a path that cannot be sent, and the errors of the
    platform."""
    shown, to = progress or SILENT, to.strip("/")
    paths = list_files(source, to)
    shown.begin(sum(path.stat().st_size for path in paths.values()))

    def send(file: VolumeFile) -> None:
        api.put_volume_file(name, file.digest, _Content(paths[file.path], shown.advance), file.size)
        shown.count_sent(file.size)

    with ThreadPoolExecutor(THREADS) as threads:
        try:
            files = list(threads.map(hashed, paths.keys(), paths.values()))
            by_digest = {file.digest: file for file in files}
            missing = _missing(api, name, list(by_digest))
            shown.advance(sum(file.size for file in files) - sum(by_digest[digest].size for digest in missing))
            list(threads.map(send, [by_digest[digest] for digest in missing]))
        except BaseException:
            threads.shutdown(cancel_futures=True)
            raise
    removed = (f"{to}/" if to else "/",) if replace else ()
    return api.commit_volume(name, files, removed)


def _missing(api: Api, name: str, digests: list[str]) -> list[str]:
    batches = (digests[at : at + _ASKED_AT_ONCE] for at in range(0, len(digests), _ASKED_AT_ONCE))
    return [digest for batch in batches for digest in api.missing_volume_files(name, batch)]


def list_files(source: Path, to: str) -> dict[str, Path]:
    """Return the files to send by their paths in the volume. Raises InvalidInput, InvalidSpec."""
    if source.is_file():
        paths = {to or source.name: source}
    elif source.is_dir():
        below = sorted(_walk(source, source))
        paths = {"/".join(filter(None, (to, path.relative_to(source).as_posix()))): path for path in below}
    else:
        raise InvalidInput(f"there is no file or folder {source}", field="source")
    for target in paths:
        check_path(target, "volume")
    return paths


def _walk(folder: Path, root: Path) -> Iterator[Path]:
    for path in folder.iterdir():
        if path.is_symlink() and not is_inside(root, path):
            raise InvalidInput(f"{path} is a link to a file outside of {root}: copy the file there", field="source")
        if path.is_dir():
            if path.is_symlink():
                raise InvalidInput(f"{path} is a link to a folder: a volume has files only", field="source")
            yield from _walk(path, root)
        elif path.is_file():
            yield path
        else:
            raise InvalidInput(f"{path} is not a file: a volume has files only", field="source")


def hashed(target: str, path: Path) -> VolumeFile:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    status = path.stat()
    return VolumeFile(target, status.st_size, digest, EXECUTABLE if status.st_mode & stat.S_IXUSR else MODE)


class _Content:
    """A file as a request body. Each attempt reads it from the start."""

    def __init__(self, path: Path, advance: Callable[[int], None]) -> None:
        self._path = path
        self._advance = advance
        self._counted = 0

    def __iter__(self) -> Iterator[bytes]:
        read = 0
        with self._path.open("rb") as file:
            while chunk := file.read(_CHUNK_BYTES):
                yield chunk
                read += len(chunk)
                if read > self._counted:
                    self._advance(read - self._counted)
                    self._counted = read
