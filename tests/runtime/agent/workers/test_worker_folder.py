"""Removal of a worker's folder."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpufn_runtime.agent.workers.worker_folder import WorkerFolder

NOBODY = 65534


@pytest.fixture
def folder_of_no_root() -> Iterator[Path]:
    """Return an empty folder, and drop root's rights: root ignores permissions."""
    with tempfile.TemporaryDirectory(prefix="gpufn-") as folder:
        if os.geteuid() != 0:
            yield Path(folder)
            return
        os.chown(folder, NOBODY, NOBODY)
        os.seteuid(NOBODY)
        try:
            yield Path(folder)
        finally:
            os.seteuid(0)


def test_folders_that_a_worker_has_closed_are_removed_and_nothing_that_they_point_to_is_touched(
    folder_of_no_root: Path,
) -> None:
    others, worker = folder_of_no_root / "others", folder_of_no_root / "w-1"
    others.mkdir()
    others.chmod(0o500)
    for closed, mode in (("read-only/deeper", 0o500), ("shut", 0)):
        path = worker / "tmp" / closed
        path.mkdir(parents=True)
        (path / "file").write_text("x")
        path.chmod(mode)
    (worker / "tmp" / "read-only" / "link").symlink_to(others)
    (worker / "tmp" / "read-only").chmod(0o500)
    WorkerFolder(worker).remove()
    assert not worker.exists()
    assert others.stat().st_mode & 0o777 == 0o500
