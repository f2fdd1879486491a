"""With which exit code processes end whose bus is away: another start may find it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from gpufn_platform.process.settings import EXIT_CONFIGURATION


@pytest.mark.parametrize("module", ["gpufn_runtime.runner", "gpufn_builder"])
def test_a_bus_that_is_away_at_the_start_is_no_wrong_setting(module: str, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        port = nobody.getsockname()[1]
    ended = subprocess.run(
        [sys.executable, "-m", module],
        env=os.environ | {"GPUFN_HOME": str(tmp_path), "GPUFN_NATS_URL": f"nats://127.0.0.1:{port}"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode not in (0, EXIT_CONFIGURATION)
    assert f"127.0.0.1:{port}" in ended.stderr.splitlines()[-1]
