"""A folder that was mounted before its worker was known replaces the worker's folder."""

from __future__ import annotations

import errno
import os
import socket
from pathlib import Path

import pytest

from gpufn_core.errors import PlatformError
from gpufn_runtime.agent.launchers.containers import container_folder

UID = os.getuid()


def test_weights_are_links_and_no_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = tmp_path / "weights"
    (weights / "sub").mkdir(parents=True)
    (weights / "sub" / "w").write_text("w")
    container_folder.make(tmp_path / "c-1", UID)
    container_folder.add_weights(weights, tmp_path / "c-1" / "weights" / "a")
    assert (tmp_path / "c-1/weights/a/sub/w").samefile(weights / "sub/w")

    def to_another_disk(*_: object) -> None:
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", to_another_disk)
    with pytest.raises(PlatformError, match="GPUFN_HOME"):
        container_folder.add_weights(weights, tmp_path / "c-1" / "weights" / "b")


def test_it_moves_the_existing_files_and_the_place(tmp_path: Path) -> None:
    mounted, worker = tmp_path / "c-1", tmp_path / "w-1"
    container_folder.make(mounted, UID)
    seen_by_the_container = os.open(mounted, os.O_RDONLY)
    worker.mkdir()
    (worker / "config.json").write_text("{}")
    with socket.socket(socket.AF_UNIX) as runner:
        runner.bind(os.fspath(worker / "s"))
        runner.listen()
        container_folder.replace_worker_folder(mounted, worker, UID)
        assert sorted(os.listdir(seen_by_the_container)) == sorted(os.listdir(worker)) == ["config.json", "s"]
        with socket.socket(socket.AF_UNIX) as inside:
            inside.connect(os.fspath(worker / "s"))  # it still listens
    os.close(seen_by_the_container)
    assert not mounted.exists()


def test_the_worker_s_folder_need_not_be_there(tmp_path: Path) -> None:
    container_folder.make(tmp_path / "c-1", UID)
    container_folder.replace_worker_folder(tmp_path / "c-1", tmp_path / "w-1", UID)
    assert (tmp_path / "w-1").is_dir()


def test_files_that_arrive_during_the_move_are_moved_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mounted, worker = tmp_path / "c-1", tmp_path / "w-1"
    container_folder.make(mounted, UID)
    worker.mkdir()
    rename, late = os.rename, [worker / "s"]

    def rename_after_the_runner(source: Path, target: Path) -> None:
        if source == mounted and late:
            late.pop().write_text("")
        rename(source, target)

    monkeypatch.setattr(os, "rename", rename_after_the_runner)
    container_folder.replace_worker_folder(mounted, worker, UID)
    assert os.listdir(worker) == ["s"]


def test_resources_of_a_dead_container_go_to_the_next_one(tmp_path: Path) -> None:
    bundle, worker = tmp_path / "bundle", tmp_path / "w-1"
    bundle.mkdir()
    (bundle / "app.py").write_text("")
    worker.mkdir()
    (worker / "config.json").write_text("{}")
    for name in ("c-1", "c-2"):
        mounted = tmp_path / name
        container_folder.make(mounted, UID)
        container_folder.add_files(mounted, UID, os.fspath(bundle), {"net": (os.fspath(bundle),)})
        container_folder.replace_worker_folder(mounted, worker, UID)
        assert sorted(os.listdir(worker)) == ["bundle", "config.json", "engines"]
        assert os.listdir(worker / "bundle") == ["app.py"]


def test_a_folder_that_never_settles_is_abandoned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mounted, worker = tmp_path / "c-1", tmp_path / "w-1"
    container_folder.make(mounted, UID)
    worker.mkdir()
    rename = os.rename

    def rename_after_the_runner(source: Path, target: Path) -> None:
        if source == mounted:
            (worker / "s").write_text("")
        rename(source, target)

    monkeypatch.setattr(os, "rename", rename_after_the_runner)
    with pytest.raises(PlatformError, match="keeps writing"):
        container_folder.replace_worker_folder(mounted, worker, UID)


def test_shared_files_are_in_memory_once_and_readable_by_all(tmp_path: Path) -> None:
    bundle, engine = tmp_path / "bundle", tmp_path / "engines" / "k1"
    (bundle / "package").mkdir(parents=True)
    (bundle / "package" / "app.py").write_text("x = 1")
    engine.mkdir(parents=True)
    (engine / "plan").write_bytes(b"plan")
    mounted = tmp_path / "c-1"
    container_folder.make(mounted, UID)
    container_folder.add_files(mounted, UID, os.fspath(bundle), {"net": (os.fspath(engine),)})
    assert (mounted / "bundle" / "package" / "app.py").samefile(bundle / "package" / "app.py")
    assert (mounted / "engines" / "k1" / "plan").samefile(engine / "plan")
    modes = {path.name: oct(path.stat().st_mode & 0o777) for path in mounted.rglob("*") if path.is_dir()}
    assert set(modes.values()) == {"0o755"}
    assert oct(mounted.stat().st_mode & 0o777) == "0o700"


def test_a_missing_bundle_is_reported(tmp_path: Path) -> None:
    container_folder.make(tmp_path / "c-1", UID)
    with pytest.raises(PlatformError, match="files of c-1"):
        container_folder.add_files(tmp_path / "c-1", UID, "", {"net": (os.fspath(tmp_path / "k1" / "x"),)})
