"""Profiles of a process by py-spy, and why there is none."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gpufn_core.errors import Conflict, GpufnError, InvalidInput, WorkerLost
from gpufn_core.protocol.profiles import ProfileRequest
from gpufn_platform.sandbox.support import probe
from gpufn_runtime.agent.workers import processes, profiler
from gpufn_runtime.agent.workers.profiler import CannotProfile, Profiler, find_program
from tests.conftest import missing

SPIN = "def spin():\n    while True: pass\nprint('runs', flush=True)\nspin()"


# The worker is a child of the container's first process, and has a thread that waits for a pipe.
CONTAINED = (
    """
import os, threading
if os.fork():
    os.wait()
threading.Thread(target=os.read, args=(os.pipe()[0], 1), daemon=True).start()
"""
    + SPIN
)


# In its PID namespace the worker is not the first process.
SANDBOXED = (
    """
import os, threading
from gpufn_core.protocol.launch import Sandbox
from gpufn_platform.sandbox.enter import enter, enter_pid_namespace
from gpufn_platform.sandbox.host_paths import own_python_folders
sandbox = Sandbox(readable=own_python_folders([], os.environ), own_pids=True)
enter_pid_namespace(sandbox, report=lambda pid: print(pid, flush=True))
enter(sandbox)
threading.Thread(target=os.read, args=(os.pipe()[0], 1), daemon=True).start()
"""
    + SPIN
)


@contextlib.contextmanager
def in_pid_namespace(source: str) -> Iterator[int]:
    """Run Python as the first process of a PID namespace. Yields its pid out here."""
    command = ["unshare", "--pid", "--fork", "--kill-child", sys.executable, "-c", source]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        if not process.stdout.readline():
            missing("no PID namespace")
        [first] = processes.children(process.pid)
        yield first
        process.kill()


@pytest.fixture
def spinning() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", SPIN], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process
        process.kill()


def profiler_of(process: subprocess.Popen[bytes]) -> Profiler:
    worker: Any = SimpleNamespace(process=processes.identify(process.pid), container="")
    bus: Any = None
    return Profiler(bus, "node", {"w-1": worker})


def test_a_profile_has_the_stacks_and_one_runs_at_a_time(spinning: subprocess.Popen[bytes]) -> None:
    if find_program() is None:
        missing("py-spy is not installed")

    async def scenario() -> str:
        profiler = profiler_of(spinning)
        first = asyncio.create_task(profiler.profile(ProfileRequest("w-1", 1.0)))
        await asyncio.sleep(0)
        with pytest.raises(Conflict):
            await profiler.profile(ProfileRequest("w-1", 1.0))
        assert profiler.has_child_processes, "otherwise the agent would reap py-spy, whose exit code is needed"
        stacks = await first
        assert not profiler.has_child_processes
        return stacks

    assert "spin (<string>:" in asyncio.run(scenario())


def test_the_init_of_a_container_and_threads_that_wait_are_left_out() -> None:
    """Bugs: a third of the samples was the init, and threads that wait counted as busy, because py-spy did not find
    them by the numbers that they have in the container."""
    if find_program() is None:
        missing("py-spy is not installed")
    with in_pid_namespace(CONTAINED) as first:
        worker: Any = SimpleNamespace(process=processes.identify(first), container="c-1")
        bus: Any = None
        stacks = asyncio.run(Profiler(bus, "node", {"w-1": worker}).profile(ProfileRequest("w-1", 1.0)))
    assert [line for line in stacks.splitlines() if ";spin (<string>:" not in line] == []
    assert ";spin (<string>:" in stacks


def test_threads_that_wait_in_a_sandbox_are_left_out() -> None:
    if find_program() is None:
        missing("py-spy is not installed")
    if trouble := probe().processes:
        missing(f"a PID namespace: {trouble}")
    with subprocess.Popen([sys.executable, "-c", SANDBOXED], stdout=subprocess.PIPE) as first:
        assert first.stdout is not None
        process = processes.identify(int(first.stdout.readline()))
        assert process is not None
        assert first.stdout.readline() == b"runs\n"
        try:
            worker: Any = SimpleNamespace(process=process, container="")
            bus: Any = None
            stacks = asyncio.run(Profiler(bus, "node", {"w-1": worker}).profile(ProfileRequest("w-1", 1.0)))
        finally:
            processes.kill(process)
    assert [line for line in stacks.splitlines() if ";spin (<string>:" not in line] == []
    assert ";spin (<string>:" in stacks


def test_a_worker_that_ends_meanwhile_is_an_error(spinning: subprocess.Popen[bytes]) -> None:
    if find_program() is None:
        missing("py-spy is not installed")

    async def scenario() -> None:
        profiling = asyncio.create_task(profiler_of(spinning).profile(ProfileRequest("w-1", 2.0)))
        await asyncio.sleep(0)
        spinning.kill()
        await profiling

    with pytest.raises(WorkerLost):
        asyncio.run(scenario())


@pytest.mark.parametrize(
    ("request_", "program", "error"),
    [
        (ProfileRequest("w-2", 1.0), "py-spy", WorkerLost),
        (ProfileRequest("w-1", 1e9), "py-spy", InvalidInput),
        (ProfileRequest("w-1", 1.0), None, CannotProfile),
        (ProfileRequest("w-1", 1.0), "false", CannotProfile),
    ],
)
def test_why_there_is_no_profile(
    spinning: subprocess.Popen[bytes],
    monkeypatch: pytest.MonkeyPatch,
    request_: ProfileRequest,
    program: str | None,
    error: type[GpufnError],
) -> None:
    monkeypatch.setattr(profiler, "find_program", lambda: program)
    with pytest.raises(error):
        asyncio.run(profiler_of(spinning).profile(request_))


def test_the_program_has_limits_because_a_function_chooses_its_stacks(
    spinning: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Bug: 4 s of 900 frames with long names took 660 MB of memory and a file of 336 MB."""
    program = tmp_path / "limits"
    program.write_text('#!/bin/sh\necho "$(ulimit -d) KiB, $(ulimit -f) blocks" > "$5"\n')
    program.chmod(0o755)
    monkeypatch.setattr(profiler, "find_program", lambda: str(program))
    monkeypatch.setattr(profiler, "_EXTRA_S", 3.0)
    limits = asyncio.run(profiler_of(spinning).profile(ProfileRequest("w-1", 1.0)))
    assert limits == f"{1 << 20} KiB, {(64 << 20) // 512} blocks\n"


@pytest.mark.parametrize("name", ["XFSZ", "ABRT"])
def test_stacks_that_are_too_large_are_an_error(
    spinning: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    program = tmp_path / "ends"
    program.write_text(f"#!/bin/sh\nkill -{name} $$\n")
    program.chmod(0o755)
    monkeypatch.setattr(profiler, "find_program", lambda: str(program))
    with pytest.raises(CannotProfile, match="too large"):
        asyncio.run(profiler_of(spinning).profile(ProfileRequest("w-1", 1.0)))
