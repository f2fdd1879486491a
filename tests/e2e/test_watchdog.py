"""Every process of the platform sends watchdog messages to its supervisor."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from gpufn_local.up import _PROGRAMS
from gpufn_platform.process.watchdog import ALIVE


@pytest.mark.parametrize("module", _PROGRAMS.values())
def test_a_process_sends_watchdog_messages_from_its_start(module: str, tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as watchdog:
        watchdog.bind(str(tmp_path / "notify"))
        watchdog.settimeout(60)
        environ = {
            "GPUFN_HOME": str(tmp_path / "home"),
            "GPUFN_NATS_URL": "nats://127.0.0.1:1",
            "GPUFN_PORT": "0",
            "NOTIFY_SOCKET": str(tmp_path / "notify"),
            "WATCHDOG_USEC": "60000000",
        }
        process = subprocess.Popen([sys.executable, "-m", module], env=os.environ | environ, stderr=subprocess.DEVNULL)
        try:
            assert watchdog.recv(64) == ALIVE
        finally:
            process.kill()
            process.wait()
