"""The source of a deploy."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpufn.deploy.deploy_source import normal_remote, project_id, source_of_file

_CONFIG = """[core]
\trepositoryformatversion = 0
[remote "fork"]
\turl = https://host/other/fork
[remote "origin"]
\tfetch = +refs/heads/*:refs/remotes/origin/*
\turl = {url}
[branch "main"]
\tremote = origin
"""


def _clone(folder: Path, url: str) -> Path:
    (folder / ".git").mkdir(parents=True)
    (folder / ".git/config").write_text(_CONFIG.format(url=url))
    (folder / "src").mkdir()
    return folder


def test_a_file_is_named_below_its_project(tmp_path: Path) -> None:
    clone = _clone(tmp_path / "vision", "https://host/a/vision.git")
    source = source_of_file(clone / "src/ocr.py")
    assert (source.file, source.project) == ("src/ocr.py", "vision")
    assert str(source).split()[::4] == ["src/ocr.py", "vision"]
    assert str(tmp_path) not in repr(source)
    assert "@" in source.deployer


def test_every_clone_of_a_repository_is_one_project(tmp_path: Path) -> None:
    one = _clone(tmp_path / "one", "https://me:secret@host/a/vision.git")
    other = _clone(tmp_path / "other", "git@host:a/vision.git")
    third = _clone(tmp_path / "third", "git@host:a/speech.git")
    assert project_id(one) == project_id(other) != project_id(third)


def test_a_worktree_belongs_to_the_project_of_its_repository(tmp_path: Path) -> None:
    clone = _clone(tmp_path / "vision", "https://host/a/vision.git")
    git = clone / ".git/worktrees/fix"
    git.mkdir(parents=True)
    (git / "commondir").write_text("../..\n")
    (tmp_path / "fix").mkdir()
    (tmp_path / "fix/.git").write_text(f"gitdir: {git}\n")
    assert project_id(tmp_path / "fix") == project_id(clone)


def test_without_git_a_project_is_its_folder(tmp_path: Path) -> None:
    for name in ("one", "other"):
        (tmp_path / name / "src").mkdir(parents=True)
        (tmp_path / name / "pyproject.toml").touch()
    one, other = (source_of_file(tmp_path / name / "src/app.py") for name in ("one", "other"))
    assert (one.file, one.project, one.is_same_file(other)) == ("src/app.py", "one", False)
    assert source_of_file(tmp_path / "app.py").project == tmp_path.name


@pytest.mark.parametrize(
    ("url", "normal"),
    [
        ("https://host/a/b.git", "host/a/b"),
        ("https://me:secret@host:8443/a/b/", "host:8443/a/b"),
        ("git@host:a/b.git", "host/a/b"),
        ("ssh://git@host/a/b", "host/a/b"),
        ("/srv/git/b.git", "/srv/git/b"),
    ],
)
def test_the_address_of_a_remote_has_one_spelling(url: str, normal: str) -> None:
    assert normal_remote(url) == normal
