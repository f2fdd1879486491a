from __future__ import annotations

from pathlib import Path

import pytest

from tests.gateway.oip.regions import Folder


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    (tmp_path / "shm").mkdir()
    return Folder(tmp_path / "shm")
