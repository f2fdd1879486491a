"""`gpufn exec` and `gpufn shell`: a command in a worker of its own, with pipes and with a terminal."""

from __future__ import annotations

import contextlib
import fcntl
import gzip
import json
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from gpufn_runtime.agent.workers.profiler import find_program
from tests import torch_stand_in
from tests.conftest import Platform, missing
from tests.waiting import until

pytestmark = pytest.mark.e2e

APP = """
import time

from gpufn import gpu_function
print("imported")

@gpu_function(cpu=0.25, env={"COLOUR": "red"})
def place(x: int = 1) -> int:
    return x

def spin(seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for _ in range(200):
            sum(range(1000))
        time.sleep(0.01)  # a profiler with 100 samples a second sees half of the time too

@gpu_function(cpu=0.25)
def busy(seconds: float) -> None:
    spin(seconds)
"""


TENSOR_APP = """
import torch.profiler

from gpufn import gpu_function

@gpu_function(cpu=0.25)
def tensors() -> None:
    pass
"""


@pytest.fixture(scope="module")
def place(platform: Platform, tmp_path_factory: pytest.TempPathFactory) -> Platform:
    file = tmp_path_factory.mktemp("exec") / "place_app.py"
    file.write_text(APP)
    platform.gpufn("deploy", file, "--no-check")
    return platform


def started(platform: Platform, *command: str, **options: Any) -> subprocess.Popen[bytes]:
    environ = os.environ | {"GPUFN_URL": platform.url, "GPUFN_HOME": str(platform.home)}
    return subprocess.Popen([sys.executable, "-m", "gpufn", *command], env=environ, **options)


def run(platform: Platform, *command: str, data: bytes = b"") -> tuple[int, bytes, bytes]:
    process = started(
        platform, "exec", "place", "--", *command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    out, error = process.communicate(data, timeout=60)
    return process.returncode, out, error


def terminals(platform: Platform) -> list[str]:
    return [each["name"] for each in platform.client.get("/v1/functions").json()["functions"] if "=" in each["name"]]


def has_command(mark: str) -> bool:
    """Return whether the command line of a process of the machine contains `mark`."""
    for process in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if process.name.isdigit() and mark.encode() in (process / "cmdline").read_bytes():
                return True
    return False


def records(platform: Platform, action: str) -> list[dict[str, Any]]:
    entries = platform.client.get("/v1/audit", params={"limit": 1000}).json()["records"]
    return [each for each in entries if each["action"] == action]


def test_a_command_has_the_environment_pipes_and_an_exit_code(place: Platform) -> None:
    script = "cat; echo $COLOUR; ls; echo to-stderr >&2; exit 3"
    code, out, error = run(place, "sh", "-c", script, data=b"input\n")
    assert (code, out, error) == (3, b"input\nred\nplace_app.py\n", b"to-stderr\n")
    until(lambda: not terminals(place))
    entries = [each for each in records(place, "GET /v1/functions/{fn}/exec") if each["object"] == "place"]
    start, end = sorted(entries, key=lambda each: int(each["seq"]))[-2:]
    assert json.loads(start["details"]["command"]) == ["sh", "-c", script]
    assert (start["status"], end["status"], end["details"]["exit_code"]) == (101, 200, "3")
    assert end["details"]["worker"]


def test_how_a_command_can_fail(place: Platform) -> None:
    assert run(place, "no-such-program")[0] == 127
    assert run(place, "/etc")[0] == 126
    assert run(place, "sh", "-c", "kill -9 $$")[0] == 128 + signal.SIGKILL
    code, _, error = run(place, "sh", "-c", "kill -9 $PPID; sleep 60")  # the worker itself
    assert code not in (0, 137), error
    assert place.try_gpufn("exec", "no-such-function", "--", "ls").returncode == 4
    assert place.try_gpufn("exec", "place", "--tty", "--", "ls").returncode == 2
    assert place.try_gpufn("shell", "place").returncode == 2


def test_the_command_ends_with_its_client(place: Platform) -> None:
    mark = uuid.uuid4().hex
    client = started(
        place, "exec", "place", "--", "sh", "-c", f"echo runs; sleep 600; : {mark}", stdout=subprocess.PIPE
    )
    assert client.stdout is not None
    assert client.stdout.readline() == b"runs\n"
    assert has_command(mark)
    client.kill()
    client.wait()
    client.stdout.close()
    until(lambda: not has_command(mark))
    until(lambda: not terminals(place))


@pytest.mark.parametrize("first", ["{}garbage", '{"command": [""]}', b"\x00binary"])
def test_garbage_instead_of_a_start_is_refused(place: Platform, first: str | bytes) -> None:
    with connect(f"ws{place.url.removeprefix('http')}/v1/functions/place/exec", proxy=None) as client:
        client.send(first)
        problem = json.loads(client.recv(timeout=20, decode=False)[1:])["problem"]
        assert (problem["status"], problem["code"]) == (422, "invalid_input")
        with pytest.raises(ConnectionClosed):
            client.recv(timeout=20)
    assert not terminals(place)


def test_a_profile_shows_where_a_worker_spends_its_time(place: Platform, tmp_path: Path) -> None:
    if find_program() is None:
        missing("py-spy is not installed")
    assert place.try_gpufn("profile", "busy", "--seconds", "1").returncode == 6  # it has no worker
    call = json.loads(place.gpufn("submit", "busy", '{"seconds": 60}', "--json"))["id"]
    until(lambda: place.client.get(f"/v1/invocations/{call}").json()["state"] == "running")
    file = tmp_path / "busy.json"
    shown = json.loads(place.gpufn("profile", "busy", "--seconds", "1", "--call", call, "--out", file, "--json"))
    assert shown["top"][0]["frame"].startswith("spin ")
    assert any(frame["name"] == "spin" for frame in json.loads(file.read_text())["shared"]["frames"])
    memory = json.loads(place.gpufn("profile", "busy", "--memory", "--seconds", "1", "--json"))
    assert (memory["worker"], memory["bytes"] > 0) == (shown["worker"], True)
    (record,) = records(place, "POST /v1/functions/{fn}/profile")[-1:]
    assert (record["object"], record["details"]["worker"]) == ("busy", shown["worker"])
    place.gpufn("cancel", call)


def workers_of(platform: Platform, function: str) -> list[str]:
    nodes = platform.client.get("/v1/nodes").json()["nodes"]
    return [each["worker"] for node in nodes for each in node["processes"] if each["function"] == function]


def test_a_call_that_runs_long_is_profiled_and_without_one_there_is_an_error(place: Platform) -> None:
    if find_program() is None:
        missing("py-spy is not installed")
    url, body = "/v1/functions/busy/profile", {"seconds": 1, "slower_than_s": 0.5}
    until(lambda: not workers_of(place, "busy"))  # a cancelled call of another test has ended
    none = place.client.post(url, json=body | {"wait_s": 0})
    assert (none.status_code, none.json()["code"]) == (404, "invocation_not_found")
    call = json.loads(place.gpufn("submit", "busy", '{"seconds": 60}', "--json"))["id"]
    until(lambda: place.client.get(f"/v1/invocations/{call}").json()["state"] == "running")
    profile = place.client.post(url, json=body, timeout=90)
    assert profile.status_code == 200, profile.text
    assert profile.headers["x-gpufn-invocation"] == call
    assert any(frame["name"] == "spin" for frame in profile.json()["shared"]["frames"])
    shown = json.loads(place.gpufn("profile", "busy", "--seconds", "1", "--slower-than", "0.5s", "--json"))
    assert shown["worker"] == profile.headers["x-gpufn-worker"]
    without_torch = place.client.post(url, json={"kind": "gpu", "seconds": 1})
    assert (without_torch.status_code, without_torch.json()["code"]) == (409, "conflict")
    place.gpufn("cancel", call)


def test_the_trace_of_a_gpu_has_the_calls_of_a_worker_with_torch(place: Platform, tmp_path: Path) -> None:
    """A package replaces torch."""
    torch_stand_in.write(tmp_path)
    app, file = tmp_path / "tensor_app.py", tmp_path / "trace.json.gz"
    app.write_text(TENSOR_APP)
    place.gpufn("deploy", app, "--no-check")
    calls = [place.post("tensors", {}).headers["x-gpufn-invocation"]]
    profiling = started(
        place, "profile", "tensors", "--gpu", "--seconds", "2", "--out", str(file), "--json", stdout=subprocess.PIPE
    )
    while profiling.poll() is None:
        calls.append(place.post("tensors", {}).headers["x-gpufn-invocation"])
        time.sleep(0.02)
    shown = json.loads(profiling.communicate()[0])
    assert (profiling.returncode, shown["kind"]) == (0, "operator")
    assert [each["name"] for each in shown["top"]] == ["aten::mm"]
    names = {event["name"] for event in json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]}
    assert names - {"aten::mm"} <= {f"call {call}" for call in calls}
    assert len(names) > 2


@contextlib.contextmanager
def in_terminal(platform: Platform, *command: str) -> Iterator[tuple[int, int]]:
    """Run gpufn in a pseudo-terminal. Yield its pid, and the other end."""
    environ = os.environ | {"GPUFN_URL": platform.url, "GPUFN_HOME": str(platform.home), "TERM": "dumb"}
    environ |= {"COLUMNS": "200", "LINES": "10"}  # as GNU readline sets them; they do not follow the window
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 33, 99, 0, 0))
    process = subprocess.Popen(
        [sys.executable, "-m", "gpufn", *command], env=environ, stdin=theirs, stdout=theirs, stderr=theirs
    )
    try:
        yield process.pid, ours
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        process.wait()
        os.close(ours)
        os.close(theirs)


def read_until(fd: int, end: bytes) -> bytes:
    received, deadline = b"", time.monotonic() + 30
    while end not in received:
        ready, _, _ = select.select([fd], [], [], max(0.0, deadline - time.monotonic()))
        assert ready, received
        received += os.read(fd, 65536)
    return received


def test_a_shell_has_a_terminal_which_is_restored(place: Platform) -> None:
    with in_terminal(place, "shell", "place") as (pid, fd):
        os.write(fd, b"PS1='%'; stty size; echo $TERM-$((40 + 2))\r")
        received = read_until(fd, b"dumb-42")
        assert b"33 99" in received
        fcntl.ioctl(fd, termios.TIOCSWINSZ, struct.pack("HHHH", 44, 77, 0, 0))
        os.kill(pid, signal.SIGWINCH)
        os.write(fd, b"until stty size | grep '44 77'; do :; done; echo resized-$((1 + 1))\r")
        read_until(fd, b"resized-2")
        # One program, because a shell between two of them may lose a signal.
        os.write(fd, b"python -c 'import time; print(1 + 1, \"sleeps\", flush=True); time.sleep(600)'\r")
        read_until(fd, b"2 sleeps")
        os.write(fd, b"\x03")
        os.write(fd, b"echo code=$?; exit 5\r")
        read_until(fd, b"code=130")
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 5
        assert termios.tcgetattr(fd)[3] & termios.ECHO


def test_a_user_leaves_a_command_that_does_not_respond(place: Platform) -> None:
    with in_terminal(place, "exec", "place", "--", "sh", "-c", "trap '' INT; echo ready; sleep 600") as (pid, fd):
        read_until(fd, b"ready")
        os.write(fd, b"\x03\r~.")
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1
        assert termios.tcgetattr(fd)[3] & termios.ECHO
    until(lambda: not terminals(place))
