"""Copies of files to and from volumes, against a store in memory."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import pytest

from gpufn.volumes.download import get_files
from gpufn.volumes.progress import Progress
from gpufn.volumes.upload import put_files
from gpufn_core.errors import ArtifactUnavailable, DataNotFound, InvalidInput, InvalidSpec
from gpufn_core.spec.volume_spec import VolumeChange, VolumeFile, VolumeTree, VolumeVersion, changed


class Store:
    """The Client's methods for one volume."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.tree = VolumeTree("v", 0, ())
        self.sent: list[str] = []

    def missing_volume_files(self, name: str, digests: Sequence[str]) -> list[str]:
        return [digest for digest in digests if digest not in self.files]

    def put_volume_file(self, name: str, digest: str, chunks: Iterable[bytes], size: int) -> None:
        self.files[digest] = b"".join(chunks)
        assert (len(self.files[digest]), hashlib.sha256(self.files[digest]).hexdigest()) == (size, digest)
        self.sent.append(digest)

    def commit_volume(
        self, name: str, put: Iterable[VolumeFile] = (), remove: Iterable[str] = (), *, base: int | None = None
    ) -> VolumeVersion:
        self.tree = changed("v", self.tree.version + 1, self.tree.files, VolumeChange(tuple(put), tuple(remove)))
        return VolumeVersion(self.tree.version, "", len(self.tree.files), 0, 0.0)

    def volume_tree(self, name: str, version: int | None = None) -> VolumeTree:
        return self.tree

    def read_volume_file(self, name: str, digest: str) -> Iterator[bytes]:
        yield self.files[digest]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "folder"
    (folder / "sub").mkdir(parents=True)
    (folder / "a").write_bytes(b"same")
    (folder / "sub" / "b").write_bytes(b"same")
    (folder / "sub" / ".hidden").write_bytes(b"")
    return folder


def test_equal_files_are_sent_once_and_a_repetition_sends_nothing(folder: Path) -> None:
    store, reported = Store(), [(0, 0)]
    progress = Progress(lambda done, total: reported.append((done, total)))
    put_files(store, "v", folder, "top", progress=progress)
    assert [file.path for file in store.tree.files] == ["top/a", "top/sub/.hidden", "top/sub/b"]
    assert (len(store.sent), progress.sent_files, reported[-1]) == (2, 2, (8, 8))
    put_files(store, "v", folder, "top")
    assert len(store.sent) == 2


def test_a_copy_can_replace_a_folder(folder: Path) -> None:
    store = Store()
    put_files(store, "v", folder, "top")
    put_files(store, "v", folder / "a", "other")
    put_files(store, "v", folder / "sub", "top", replace=True)
    assert [file.path for file in store.tree.files] == ["other", "top/.hidden", "top/b"]


@pytest.mark.parametrize("target", ["../outside", "/etc/passwd"])
def test_a_link_that_leaves_the_folder_is_refused(folder: Path, target: str) -> None:
    (folder / "link").symlink_to(target)
    with pytest.raises(InvalidInput):
        put_files(Store(), "v", folder)


def test_entries_other_than_files_are_refused(folder: Path) -> None:
    os.mkfifo(folder / "fifo")
    with pytest.raises(InvalidInput):
        put_files(Store(), "v", folder)
    with pytest.raises(InvalidInput):
        put_files(Store(), "v", folder / "absent")
    with pytest.raises(InvalidSpec):
        put_files(Store(), "v", folder / "a", "../a")


def test_files_that_are_there_are_not_fetched_again(folder: Path, tmp_path: Path) -> None:
    store, target = Store(), tmp_path / "target"
    put_files(store, "v", folder)
    progress = Progress(lambda done, total: None)
    get_files(store, "v", target, progress=progress)
    assert progress.sent_files == 3
    (target / "a").write_bytes(b"edit")
    get_files(store, "v", target, progress=progress)
    assert (progress.sent_files, (target / "a").read_bytes()) == (4, b"same")
    assert [file.path for file in get_files(store, "v", target, "sub").files] == ["sub/.hidden", "sub/b"]
    with pytest.raises(DataNotFound):
        get_files(store, "v", target, "absent")


@pytest.mark.parametrize("path", [".", "./", "/", "./sub/.."])
def test_a_point_is_the_top_of_the_volume(folder: Path, tmp_path: Path, path: str) -> None:
    store = Store()
    put_files(store, "v", folder)
    assert get_files(store, "v", tmp_path / "target", path) == get_files(store, "v", tmp_path / "target")
    assert [file.path for file in get_files(store, "v", tmp_path / "target", "./sub").files] == ["sub/.hidden", "sub/b"]


def test_a_damaged_file_does_not_appear(folder: Path, tmp_path: Path) -> None:
    store = Store()
    put_files(store, "v", folder / "a")
    store.files = dict.fromkeys(store.files, b"sAme")
    with pytest.raises(ArtifactUnavailable):
        get_files(store, "v", tmp_path / "target")
    assert list((tmp_path / "target").iterdir()) == []


def test_a_link_in_the_target_is_not_followed_outside(folder: Path, tmp_path: Path) -> None:
    store, target = Store(), tmp_path / "target"
    put_files(store, "v", folder)
    target.mkdir()
    (target / "sub").symlink_to(tmp_path)
    with pytest.raises(InvalidInput):
        get_files(store, "v", target)
    assert not (tmp_path / "b").exists()
