"""Private folders of the platform."""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path

import pytest

from gpufn_core.errors import PlatformError
from gpufn_core.home import Home


def mode(path: Path) -> str:
    return oct(stat.S_IMODE(path.stat().st_mode))


@pytest.fixture
def deep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Home:
    """A home too deep for sockets: its run folder is in a place where every user can create folders."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return Home(tmp_path / ("x" * 66))


def test_its_folders_are_for_their_owner_only(tmp_path: Path) -> None:
    home = Home(tmp_path / "h")
    home.logs.mkdir(parents=True)
    home.root.chmod(0o777)
    home.logs.chmod(0o755)
    home.ensure()
    folders = (home.root, home.run, home.workers, home.logs, home.cache, home.bundles)
    assert [mode(folder) for folder in folders] == ["0o700"] * 6


def test_a_folder_that_users_share_is_refused_and_stays_shared(tmp_path: Path) -> None:
    tmp_path.chmod(0o1777)
    with pytest.raises(PlatformError, match="GPUFN_HOME"):
        Home(tmp_path).ensure()
    assert mode(tmp_path) == "0o1777"


@pytest.mark.parametrize(("permissions", "is_refused"), [(0o777, True), (0o775, False)])
def test_a_folder_of_another_user_is_refused_if_every_user_may_write_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, permissions: int, is_refused: bool
) -> None:
    root = tmp_path / "h"
    root.mkdir()
    root.chmod(permissions)
    chmod = Path.chmod

    def chmod_ours(path: Path, wanted: int) -> None:
        if path == root:
            raise PermissionError
        chmod(path, wanted)

    monkeypatch.setattr(Path, "chmod", chmod_ours)
    with pytest.raises(PlatformError, match="chmod") if is_refused else contextlib.nullcontext():
        Home(root).ensure()


def test_a_run_folder_elsewhere_is_made_and_found_again(deep: Home) -> None:
    assert deep.run.parent != deep.root
    deep.ensure()
    deep.ensure()
    assert mode(deep.run) == "0o700"


def test_a_run_folder_elsewhere_that_is_a_link_is_refused(deep: Home, tmp_path: Path) -> None:
    deep.run.symlink_to(tmp_path)
    with pytest.raises(PlatformError, match=r"link or"):
        deep.ensure()


def test_a_run_folder_elsewhere_that_others_may_write_to_is_refused(deep: Home) -> None:
    deep.run.mkdir()
    deep.run.chmod(0o777)
    with pytest.raises(PlatformError, match=r"other users .* write"):
        deep.ensure()


def test_a_run_folder_of_another_user_is_refused(deep: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    deep.run.mkdir(mode=0o700)
    me = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: me + 1)
    with pytest.raises(PlatformError, match=f"user {me}:"):
        deep.ensure()


def test_files_stored_elsewhere_are_removed_when_nothing_runs_and_the_rest_stays(deep: Home) -> None:
    deep.ensure()
    folders = [deep.run / "more", deep.claim_shared_bodies() / "kept"]
    for folder in folders:
        folder.mkdir()
    deep.remove_runtime_folders()
    assert [folder.parent.exists() for folder in folders] == [False, False]
    assert deep.logs.exists()


def test_a_run_folder_of_its_own_stays(tmp_path_factory: pytest.TempPathFactory) -> None:
    home = Home(tmp_path_factory.mktemp("h"))
    assert home.run.is_relative_to(home.root)
    home.ensure()
    home.remove_runtime_folders()
    assert home.run.exists()
