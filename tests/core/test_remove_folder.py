"""Removal of folders with untrusted contents."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gpufn_core.remove_folder import remove_tree

_DEEP = """
import os, sys
os.chdir(sys.argv[1])
for _ in range(1500):
    os.mkdir("d" * 50)
    os.chdir("d" * 50)
    open("file", "w").close()
"""


def test_a_folder_of_any_depth_is_removed(tmp_path: Path) -> None:
    """Deeper than Python's stack, the path limit, and the limit of open files."""
    folder = tmp_path / "w"
    folder.mkdir()
    subprocess.run([sys.executable, "-c", _DEEP, folder], check=True)
    assert remove_tree(folder) is None
    assert not folder.exists()


def test_targets_of_links_stay(tmp_path: Path) -> None:
    others, folder = tmp_path / "others", tmp_path / "w"
    (others / "inner").mkdir(parents=True)
    (others / "file").write_text("x")
    (folder / "a" / "b").mkdir(parents=True)
    for where in (folder, folder / "a", folder / "a" / "b"):
        (where / "to-a-folder").symlink_to(others)
        (where / "to-a-file").symlink_to(others / "file")
    os.mkfifo(folder / "a" / "fifo")
    assert remove_tree(folder) is None
    assert not folder.exists()
    assert sorted(os.listdir(others)) == ["file", "inner"]


def test_a_missing_folder_is_removed_and_a_file_is_not(tmp_path: Path) -> None:
    file, link = tmp_path / "file", tmp_path / "link"
    file.write_text("x")
    link.symlink_to(tmp_path)
    assert remove_tree(tmp_path / "nothing") is None
    for path in (file, link):
        assert isinstance(remove_tree(path), OSError)
        assert path.exists()


def test_a_file_that_cannot_be_removed_is_reported_and_the_rest_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "w"
    for name in ("a", "b", "c"):
        (folder / name).mkdir(parents=True)
    rmdir = os.rmdir

    def busy(path: str, **options: int) -> None:
        if path == "b":
            raise OSError(16, "Device or resource busy", path)
        rmdir(path, **options)

    monkeypatch.setattr(os, "rmdir", busy)
    error = remove_tree(folder)
    assert error is not None
    assert (error.errno, error.filename) == (16, "b")
    assert os.listdir(folder) == ["b"]
