"""SELinux labels of folders for containers, with a file in place of the kernel's and a fake chcon."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from gpufn_runtime.agent import selinux


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of the fake chcon's calls. The fake fails for a folder named `refused`."""
    calls = tmp_path / "calls"
    chcon = tmp_path / "bin" / "chcon"
    chcon.parent.mkdir()
    refusal = 'case "$*" in *refused*) echo "invalid type" >&2; exit 1;; esac'
    chcon.write_text(f'#!/bin/sh\necho "$@" >> {calls}\n{refusal}\n')
    chcon.chmod(0o755)
    monkeypatch.setenv("PATH", f"{chcon.parent}:/bin")
    return calls


@pytest.mark.parametrize(("enforce", "labelled"), [("1", True), ("0", False), (None, False)])
def test_folders_are_labelled_where_selinux_is_enforced(
    enforce: str | None, labelled: bool, calls: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = tmp_path / "enforce"
    if enforce is not None:
        state.write_text(enforce)
    monkeypatch.setattr(selinux, "ENFORCE", state)
    present, absent = tmp_path / "pipe", tmp_path / "absent"
    present.mkdir()
    selinux.label_for_containers(present, absent)
    assert calls.exists() == labelled
    if labelled:
        assert calls.read_text().split() == ["-R", "-t", "container_file_t", "-l", "s0", "--", str(present)]


def test_a_refused_label_is_a_warning(
    calls: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    state, folder = tmp_path / "enforce", tmp_path / "refused"
    state.write_text("1")
    folder.mkdir()
    monkeypatch.setattr(selinux, "ENFORCE", state)
    with caplog.at_level(logging.WARNING):
        selinux.label_for_containers(folder)
    assert "invalid type" in caplog.text
    monkeypatch.setenv("PATH", str(tmp_path))
    selinux.label_for_containers(folder)  # without the program
    assert str(folder) in caplog.text
