"""Download of the files of a volume, several at a time.

Each file is written under a temporary name, verified, and renamed. A file that is there already, with the same bytes,
stays, so an interrupted download continues with the next file.
"""

from __future__ import annotations

import contextlib
import hashlib
import posixpath
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

import msgspec

from gpufn.volumes.links import is_inside
from gpufn.volumes.progress import SILENT, Progress
from gpufn.volumes.upload import THREADS
from gpufn_core.errors import ArtifactUnavailable, DataNotFound, InvalidInput
from gpufn_core.spec.volume_spec import VolumeFile, VolumeTree


class Api(Protocol):
    """The part of the Client that a download needs."""

    def volume_tree(self, name: str, version: int | None = None) -> VolumeTree: ...
    def read_volume_file(self, name: str, digest: str) -> Iterator[bytes]: ...


def get_files(
    api: Api, name: str, target: Path, path: str = "", *, version: int | None = None, progress: Progress | None = None
) -> VolumeTree:
    """Copy the files below `path`, or the file `path`, into the folder `target`. Return the selected files.

    "." is the top of the volume. A file of `target` with the same name and other bytes is replaced. Raises DataNotFound
    if there is no such file; ArtifactUnavailable if a file is damaged or cannot be written."""
    shown, tree = progress or SILENT, api.volume_tree(name, version)
    below = posixpath.normpath(f"/{path}").strip("/")
    selected = msgspec.structs.replace(tree, files=tuple(_selected(tree, below)))
    if below and not selected.files:
        raise DataNotFound(
            f"{name} has no file {path!r} in version {tree.version}: see `gpufn volume ls {name}`; `--to` is the "
            "folder on this machine"
        )
    shown.begin(sum(file.size for file in selected.files))

    def fetch(file: VolumeFile) -> None:
        place = target / file.path
        if _has(place, file):
            shown.advance(file.size)
            return
        try:
            _fetch(api, name, file, target, shown)
        except OSError as error:
            raise ArtifactUnavailable(f"{place} cannot be written: {error.strerror}") from error
        shown.count_sent(file.size)

    with ThreadPoolExecutor(THREADS) as threads:
        try:
            list(threads.map(fetch, selected.files))
        except BaseException:
            threads.shutdown(cancel_futures=True)
            raise
    return selected


def _selected(tree: VolumeTree, path: str) -> Iterator[VolumeFile]:
    return (file for file in tree.files if not path or file.path == path or file.path.startswith(f"{path}/"))


def _has(place: Path, file: VolumeFile) -> bool:
    try:
        if place.is_symlink() or place.stat().st_size != file.size:
            return False
        with place.open("rb") as content:
            return hashlib.file_digest(content, "sha256").hexdigest() == file.digest
    except OSError:
        return False


def _fetch(api: Api, name: str, file: VolumeFile, target: Path, shown: Progress) -> None:
    place = target / file.path
    place.parent.mkdir(parents=True, exist_ok=True)
    if place.parent != target and not is_inside(target, place.parent):
        raise InvalidInput(f"{place} would be outside of {target}: a folder on the way is a link", field="target")
    part = place.with_name(f".{place.name[:200]}.part")
    sha256, size = hashlib.sha256(), 0
    try:
        with part.open("wb") as content:
            for chunk in api.read_volume_file(name, file.digest):
                content.write(chunk)
                sha256.update(chunk)
                size += len(chunk)
                shown.advance(len(chunk))
        if size != file.size or sha256.hexdigest() != file.digest:
            raise ArtifactUnavailable(f"{file.path} of {name} arrived damaged: copy it again")
        part.chmod(file.mode)
        part.replace(place)
    finally:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
