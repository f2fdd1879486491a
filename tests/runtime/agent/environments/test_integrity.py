"""Verification reads only regular files inside the environment."""

from __future__ import annotations

import base64
import hashlib
import os
import sys
from pathlib import Path

import pytest

from gpufn_runtime.agent.environments.integrity import damage

DIGEST = base64.urlsafe_b64encode(hashlib.sha256(b"x").digest()).rstrip(b"=").decode()


@pytest.mark.parametrize("kind", ["absolute", "parent", "link", "fifo"])
def test_a_file_outside_the_environment_or_a_special_file_is_damage(kind: str, tmp_path: Path) -> None:
    environment = tmp_path / "environment"
    packages = environment / "lib/python3/site-packages"
    (packages / "a-1.dist-info").mkdir(parents=True)
    (environment / "bin").mkdir()
    (environment / "bin" / "python").symlink_to(sys.executable)
    (tmp_path / "outside").write_bytes(b"x")
    name = {"absolute": f"{tmp_path}/outside", "parent": "../../../../outside"}.get(kind, "a.py")
    if kind == "link":
        (packages / "a.py").symlink_to(tmp_path / "outside")
    elif kind == "fifo":
        os.mkfifo(packages / "a.py")
    (packages / "a-1.dist-info" / "RECORD").write_text(f"{name},sha256={DIGEST},1\n")
    assert damage(environment) == f"{name} is missing or changed"


@pytest.mark.parametrize(("content", "found"), [(b"x", ""), (b"y", ""), (b"z", "a.py is missing or changed")])
def test_a_file_of_two_packages_has_the_digest_of_one_of_them(content: bytes, found: str, tmp_path: Path) -> None:
    packages = tmp_path / "lib/python3/site-packages"
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to(sys.executable)
    for package in ("x", "y"):
        (packages / f"{package}-1.dist-info").mkdir(parents=True)
        digest = base64.urlsafe_b64encode(hashlib.sha256(package.encode()).digest()).rstrip(b"=").decode()
        (packages / f"{package}-1.dist-info" / "RECORD").write_text(f"a.py,sha256={digest},1\n")
    (packages / "a.py").write_bytes(content)
    assert damage(tmp_path) == found
