"""A process that hides its environment from other processes."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from pathlib import Path

from tests.conftest import ROOT

_HIDES = """
import ctypes, os, sys
from gpufn_platform.process.proc_hardening import hide_environment
hide_environment("SECRET", "NOT_THERE")
print(os.environ["SECRET"], ctypes.CDLL(None).prctl(3, 0, 0, 0, 0), flush=True)
sys.stdin.read()
"""


def test_the_secret_is_unreadable_although_the_process_has_it() -> None:
    environment = {"SECRET": "nats://agent:hunter2@host", "PYTHONPATH": str(ROOT / "runtime")}
    with subprocess.Popen(
        [sys.executable, "-c", _HIDES], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"nats://agent:hunter2@host 0\n"
        shown = b""
        with contextlib.suppress(PermissionError):  # root may read it, but it is empty
            shown = Path(f"/proc/{process.pid}/environ").read_bytes()
        assert b"hunter2" not in shown
        assert process.communicate()[0] == b""
