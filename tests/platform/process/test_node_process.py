"""How a runner or builder ends, tested in a separate process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

_PROGRAM = """
import asyncio, os, signal, sys
from types import SimpleNamespace
from gpufn_platform.process import node_process
from gpufn.errors import BusUnavailable, InvalidInput
from gpufn_core.home import Home

async def work():
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.Event().wait()

async def serve(settings):
    if sys.argv[1] == "bus":
        raise BusUnavailable("no bus there")
    await node_process.run_until_signaled(work(), "work")
    print("put away")

def read(environ):
    if sys.argv[1] == "setting":
        raise InvalidInput("GPUFN_X is wrong")
    return SimpleNamespace(home=Home.from_env(environ))

sys.exit(node_process.run("worker bee", read, serve))
"""


@pytest.mark.parametrize(
    ("how", "code", "said"),
    [
        ("told", 0, "put away"),
        ("bus", 1, "no bus there"),
        ("setting", 78, "GPUFN_X is wrong"),
    ],
)
def test_a_process_ends_on_request_and_reports_why_it_cannot_continue(
    tmp_path: Path, how: str, code: int, said: str
) -> None:
    environ = {**os.environ, "GPUFN_HOME": str(tmp_path / "h")}
    ended = subprocess.run(
        [sys.executable, "-c", _PROGRAM, how], env=environ, capture_output=True, text=True, timeout=60, check=False
    )
    assert (ended.returncode, (ended.stdout + ended.stderr).strip()) == (code, said)
