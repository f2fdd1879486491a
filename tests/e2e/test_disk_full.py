"""A full disk: `gpufn up` prints one clear line, and a running platform returns clear errors and stops in order."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpufn_core.protocol import subjects
from gpufn_platform.bus.connection import Bus
from tests.conftest import Platform, running_platform
from tests.e2e.chaos.gateway import embedded_bus
from tests.e2e.small_disk import fill, small_disk
from tests.waiting import until

pytestmark = pytest.mark.e2e

APP = Path(__file__).parent / "apps" / "steady.py"


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path, mebibytes=4) as disk:
        yield disk


def up(home: Path) -> subprocess.CompletedProcess[str]:
    return gpufn(home, "up", "--port", "0")


def gpufn(home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "gpufn", *arguments],
        env=os.environ | {"GPUFN_HOME": str(home)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_up_on_a_full_disk_reports_it_in_one_line(disk: Path) -> None:
    fill(disk)
    ended = up(disk / "home")
    assert ended.returncode == 1
    [line] = ended.stderr.splitlines()
    assert line.startswith("gpufn: ")
    assert "No space left on device" in line


def test_up_on_a_read_only_disk_prints_one_line_and_other_commands_report_their_findings(disk: Path) -> None:
    home = disk / "home"
    home.mkdir()
    (home / "up.lock").touch()
    subprocess.run(["mount", "-o", "remount,ro", os.fspath(disk)], check=True)
    ended = up(home)
    assert (ended.returncode, ended.stderr) == (1, f"gpufn: cannot write {home}/up.lock: Read-only file system\n")
    ended = gpufn(home, "down")
    assert (ended.returncode, ended.stdout) == (0, f"gpufn is not running in {home}\n")
    assert "GPUFN_HOME" in gpufn(home, "doctor").stdout


def test_a_platform_on_a_full_disk_refuses_writes_and_restarts(disk: Path) -> None:
    with running_platform(disk / "home") as platform:
        platform.gpufn("deploy", APP)
        assert platform.invoke("steady", {"number": 1}) == 1
        filler = fill(disk)
        refused = platform.client.post("/v1/functions/steady/submit", json={"number": 2})
        assert (refused.status_code, refused.json()["code"]) == (503, "store_full")
        assert refused.json()["retryable"] is True
        assert refused.json()["detail"].startswith("The disk of the message bus is full.")
        not_ready = platform.client.get("/readyz")
        assert (not_ready.status_code, "is full" in not_ready.text) == (503, True)
        assert platform.invoke("steady", {"number": 3}) == 3, "calls that need no disk still work"
    ended = up(disk / "home")
    assert ended.returncode == 1
    [line] = ended.stderr.splitlines()
    assert "No space left on device" in line or "is full" in line
    filler.unlink()
    with running_platform(disk / "home") as platform:
        assert platform.invoke("steady", {"number": 4}) == 4, "deployed before, and kept"


def test_a_platform_recovers_by_itself_when_its_disk_has_room_again(disk: Path) -> None:
    with running_platform(disk / "home") as platform:
        platform.gpufn("deploy", APP)
        filler = fill(disk)
        assert platform.client.post("/v1/functions/steady/submit", json={"number": 1}).status_code == 503
        pids = json.loads((disk / "home" / "up.json").read_bytes())["pids"]
        os.kill(pids["runner"], signal.SIGKILL)
        refused = platform.client.put(f"/v1/bundles/{'0' * 64}", content=b"?")
        assert (refused.status_code, refused.json()["code"]) == (503, "store_full")
        asyncio.run(write(platform))
        until(lambda: "disk" in log(platform) and " is full" in log(platform), "reported")
        filler.unlink()
        until(lambda: " has space again" in log(platform), "noticed")
        until(lambda: replaced(platform, pids) == {"nats", "runner"}, "started again")
        until(lambda: submits(platform), "stored")
        until(lambda: platform.client.get("/readyz").status_code == 200, "ready")
        assert log(platform).count(" has space again") == 1
        assert platform.invoke("steady", {"number": 2}) == 2
        assert replaced(platform, pids) == {"nats", "runner"}


async def write(platform: Platform) -> None:
    """Write more to the bus than fits into the last page of its file, which is the only space that the filler left.

    The platform's own writes are small, and would take half a minute to fill the page.
    """
    bus = await Bus.connect(embedded_bus(platform.home, "admin"), name="test")
    bus.publish(f"$KV.{subjects.LEASES}.test", bytes(8192))
    await bus.flush()
    await bus.close()


def replaced(platform: Platform, pids: dict[str, int]) -> set[str]:
    """Return the names of the processes whose pid differs from `pids`."""
    now = json.loads((platform.home / "up.json").read_bytes())["pids"]
    return {name for name in now if now[name] != pids[name]}


def log(platform: Platform) -> str:
    return (platform.home / "up.log").read_text()


def submits(platform: Platform) -> bool:
    return platform.client.post("/v1/functions/steady/submit", json={"number": 1}).status_code == 202
