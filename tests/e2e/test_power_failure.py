"""A machine that loses its power: accepted calls exist when the platform starts again.

The platform's home is on a file system of its own, in a file that a loop device writes. A copy of that file, made while
the platform runs, has what reached the device, and not what is with the kernel: as the disk after a power failure.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import Platform, missing, running_platform

pytestmark = pytest.mark.e2e

APPS = Path(__file__).parent / "apps"
CALLS = 100


@contextlib.contextmanager
def mounted(image: Path, folder: Path) -> Iterator[Path]:
    folder.mkdir()
    command = ["mount", "-o", "loop", os.fspath(image), os.fspath(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        missing(f"a file system in a file needs root and loop devices: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", os.fspath(folder)], check=True)


@pytest.fixture
def image(tmp_path: Path) -> Path:
    """An empty file system."""
    image = tmp_path / "image"
    if shutil.which("mkfs.ext4") is None:
        missing("mkfs.ext4 is not installed")
    with image.open("wb") as file:
        file.truncate(256 << 20)
    subprocess.run(["mkfs.ext4", "-q", "-F", os.fspath(image)], check=True)
    return image


def accept(platform: Platform, calls: int) -> list[str]:
    """Submit calls that wait. Return their ids."""
    ids = []
    for number in range(calls):
        answer = platform.client.post("/v1/functions/nowhere/submit", json={"number": number})
        assert answer.status_code == 202, answer.text
        ids.append(answer.json()["id"])
    return ids


def cut(image: Path, copy: Path) -> Path:
    """Copy the image as a power failure at this moment would leave it."""
    subprocess.run(["cp", "--sparse=always", os.fspath(image), os.fspath(copy)], check=True)
    return copy


def known(platform: Platform, ids: list[str]) -> list[str]:
    return [each for each in ids if platform.client.get(f"/v1/invocations/{each}").status_code == 200]


def test_accepted_calls_survive_a_power_failure(image: Path, tmp_path: Path) -> None:
    with (
        mounted(image, tmp_path / "disk") as disk,
        running_platform(disk / "home", environ={"GPUFN_SYNC": "always"}) as platform,
    ):
        platform.gpufn("deploy", APPS / "nowhere.py")
        ids = accept(platform, CALLS)
        copy = cut(image, tmp_path / "copy")
    with mounted(copy, tmp_path / "after") as disk, running_platform(disk / "home") as platform:
        assert len(known(platform, ids)) == CALLS


def test_deploys_schedules_and_keys_are_there_whatever_holds_for_calls(image: Path, tmp_path: Path) -> None:
    with (
        mounted(image, tmp_path / "disk") as disk,
        running_platform(disk / "home", environ={"GPUFN_SYNC": "never"}) as platform,
    ):
        platform.gpufn("deploy", APPS / "steady.py")
        later = {"function": "steady", "in_s": 3600, "arguments": {"number": 1}}
        assert platform.client.post("/v1/schedules", json=later).status_code == 201
        key = platform.client.post("/v1/keys", json={"label": "last", "scopes": ["admin"]})
        assert key.status_code == 201, key.text
        copy = cut(image, tmp_path / "copy")
    with mounted(copy, tmp_path / "after") as disk, running_platform(disk / "home") as platform:
        platform.client.headers["authorization"] = f"Bearer {key.json()['key']}"
        assert platform.invoke("steady", {"number": 7}) == 7
        assert [each["label"] for each in platform.client.get("/v1/keys").json()["keys"]] == ["last"]
        assert len(platform.client.get("/v1/schedules").json()["schedules"]) == 1
