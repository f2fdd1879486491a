"""The README's quick start works as written.

Blocks that start with ```sh are run, in order, by one shell in a folder that looks like a fresh clone, with a
GPUFN_HOME of their own and `gpufn` on the PATH. ```console blocks show output and are not run; nor is a block below
an HTML comment `not run: REASON`.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import QUICK, ROOT

_BLOCK = re.compile(r"(?P<skip><!-- not run: [^>]+ -->\n)?^```sh\n(?P<commands>.*?)^```$", re.MULTILINE | re.DOTALL)
_TIMEOUT_S = 180


def _commands() -> list[str]:
    text = (ROOT / "README.md").read_text()
    return [match["commands"] for match in _BLOCK.finditer(text) if not match["skip"]]


def test_the_readme_has_commands_to_run() -> None:
    assert len(_commands()) >= 3


@pytest.mark.e2e
def test_the_readme_can_be_followed_top_to_bottom(tmp_path: Path) -> None:
    binaries, checkout, port = tmp_path / "bin", tmp_path / "checkout", _free_port()
    binaries.mkdir()
    checkout.mkdir()
    (binaries / "gpufn").write_text(f'#!/bin/sh\nexec {sys.executable} -m gpufn "$@"\n')
    (binaries / "gpufn").chmod(0o755)
    (binaries / "python").symlink_to(sys.executable)
    (checkout / "examples").symlink_to(ROOT / "examples")
    environ = os.environ | {
        **QUICK,
        "GPUFN_HOME": str(tmp_path / "home"),
        "PATH": f"{binaries}:{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }
    environ.pop("GPUFN_URL", None)
    # The README says 8090, which may be taken on the machine that runs the tests.
    script = "\n".join(_commands()).replace("8090", str(port)).replace("gpufn up", f"gpufn up --port {port}")
    (tmp_path / "readme.sh").write_text(script)
    with (tmp_path / "output").open("w+") as output:
        shell = subprocess.Popen(
            ["bash", "-euxo", "pipefail", tmp_path / "readme.sh"],
            cwd=checkout,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        try:
            shell.wait(_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            os.killpg(shell.pid, signal.SIGKILL)
            shell.wait()
        finally:
            subprocess.run([binaries / "gpufn", "down"], env=environ, capture_output=True, timeout=60, check=False)
        output.seek(0)
        assert shell.returncode == 0, output.read()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
