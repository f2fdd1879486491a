from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from tests.conftest import ROOT, missing


def test_the_import_contracts_hold() -> None:
    beside = Path(sys.executable).with_name("lint-imports")
    command = str(beside) if beside.exists() else shutil.which("lint-imports")
    if command is None:
        missing("import-linter is not installed")
    ended = subprocess.run([command, "--no-cache"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr


def test_the_folders_that_hold_packages_are_no_packages_themselves() -> None:
    assert [
        str(path) for folder in ("sdk", "gateway", "runtime", "builder") for path in (ROOT / folder).glob("*.py")
    ] == []
