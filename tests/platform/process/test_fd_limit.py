"""The limit of open files and connections of a platform process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

_LOWERED = """
import resource
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (128, hard))

def look(work):
    work.close()
    print(resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard))
"""
_GATEWAY = """
from gpufn_gateway import __main__ as gateway
gateway.uvloop.run = look
gateway.run()
"""
_OF_A_NODE = """
import types
from gpufn_platform.process import node_process
from gpufn_core.home import Home

async def serve(settings): ...

node_process.uvloop.run = look
node_process.run("runner", lambda environ: types.SimpleNamespace(home=Home.from_env(environ)), serve)
"""
_AGENT = """
from gpufn_runtime.agent import __main__ as agent
agent.asyncio.run = look
agent.main()
"""


@pytest.mark.parametrize("process", [_GATEWAY, _OF_A_NODE, _AGENT], ids=["gateway", "runner", "agent"])
def test_a_process_with_many_connections_has_all_the_open_files_that_it_may(process: str, tmp_path: Path) -> None:
    found = subprocess.run(
        [sys.executable, "-c", _LOWERED + process],
        env={**os.environ, "GPUFN_HOME": str(tmp_path), "GPUFN_NATS_URL": "nats://127.0.0.1:1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout == "True\n", found.stderr
