"""Commands in the PID namespace of another process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from gpufn_platform.sandbox import system_calls as calls
from tests.conftest import missing

VISIT = (sys.executable, "-P", "-m", "gpufn_platform.sandbox.visit")
FIRST_ID = 100_000


def test_root_stays_root_in_a_container_whose_users_are_mapped() -> None:
    """Bug: in the user namespace of such a container the agent's user has no number, and loses its capabilities."""
    if os.geteuid():
        missing("root")
    ready, is_ready = os.pipe()
    mapped, is_mapped = os.pipe()
    if (first := os.fork()) == 0:
        try:
            calls.unshare(calls.CLONE_NEWUSER)
            os.write(is_ready, b"1")
            os.read(mapped, 1)
            os.setresgid(0, 0, 0)
            os.setresuid(0, 0, 0)
            calls.unshare(calls.CLONE_NEWPID)
            child = os.fork()
            if child == 0:
                signal.pause()
            os.write(is_ready, f"{child}\n".encode())
            signal.pause()
        finally:
            os._exit(1)
    try:
        os.read(ready, 1)
        for kind in ("uid", "gid"):
            Path(f"/proc/{first}/{kind}_map").write_text(f"0 {FIRST_ID} 65536")
        os.write(is_mapped, b"1")
        with open(ready) as lines:
            pid = int(lines.readline())
        try:
            command = [*VISIT, str(pid), "/bin/sh", "-c", "id -u; tr '\\0' '\\n' < /proc/1/environ | wc -l"]
            user, variables = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
        finally:
            os.kill(pid, signal.SIGKILL)
    finally:
        os.kill(first, signal.SIGKILL)
        os.waitpid(first, 0)
    assert user == "0"
    assert int(variables) > 0


@pytest.mark.parametrize(("script", "code"), [("exit 7", 7), ("kill -ABRT $$", -signal.SIGABRT)])
def test_the_visitor_ends_as_its_command(script: str, code: int) -> None:
    if os.geteuid():
        missing("root")
    with subprocess.Popen(
        ["unshare", "--pid", "--fork", "--kill-child", "sh", "-c", "echo; cat"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as inside:
        assert inside.stdout is not None
        inside.stdout.readline()
        [pid] = map(int, Path(f"/proc/{inside.pid}/task/{inside.pid}/children").read_text().split())
        visited = subprocess.run([*VISIT, str(pid), "/bin/sh", "-c", f"test $$ -lt 10 && {script}"], check=False)
        inside.kill()
    assert visited.returncode == code


def test_a_process_that_has_ended_is_an_error() -> None:
    ended = subprocess.run([*VISIT, str(2**22), "/bin/true"], capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    assert "No such file" in ended.stderr
