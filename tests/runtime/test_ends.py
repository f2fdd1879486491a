"""With which exit code processes end whose bus is away: another start may find it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

from gpufn_platform.process.settings import EXIT_CONFIGURATION


def test_a_bus_that_is_away_at_the_start_is_no_wrong_setting(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        port = nobody.getsockname()[1]
    waiting = [  # at the same time, because each waits for the bus for a while
        subprocess.Popen(
            [sys.executable, "-m", module],
            env=os.environ | {"GPUFN_HOME": str(tmp_path / module), "GPUFN_NATS_URL": f"nats://127.0.0.1:{port}"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for module in ("gpufn_runtime.runner", "gpufn_builder")
    ]
    for process in waiting:
        _, told = process.communicate(timeout=60)
        assert process.returncode not in (0, EXIT_CONFIGURATION)
        assert f"127.0.0.1:{port}" in told.splitlines()[-1]
