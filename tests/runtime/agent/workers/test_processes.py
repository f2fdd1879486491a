"""Processes are identified by pid and start time, because pids are reused."""

from __future__ import annotations

import os
import resource
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from gpufn_core.protocol.launch import Sandbox
from gpufn_platform.sandbox.enter import enter
from gpufn_platform.sandbox.support import probe
from gpufn_runtime.agent.workers import processes
from gpufn_runtime.agent.workers.processes import Process
from gpufn_runtime.agent.workers.running_workers import RunningWorker
from tests.conftest import missing


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    """An unrelated group leader."""
    process = subprocess.Popen(["sleep", "60"], start_new_session=True)
    yield process
    process.kill()
    process.wait()


def before(process: subprocess.Popen[bytes]) -> Process:
    """Return an identity with the same pid and another start time."""
    found = processes.identify(process.pid)
    assert found is not None
    return Process(process.pid, found.start_time - 1)


def test_a_process_is_killed(sleeper: subprocess.Popen[bytes]) -> None:
    found = processes.identify(sleeper.pid)
    assert found is not None
    processes.kill(found)
    assert sleeper.wait() == -signal.SIGKILL
    processes.kill(found)  # already gone


def test_a_new_process_with_the_pid_is_not_signalled(sleeper: subprocess.Popen[bytes]) -> None:
    processes.kill(before(sleeper))
    processes.signal_group(before(sleeper), signal.SIGKILL)
    sleeper.send_signal(signal.SIGTERM)
    assert sleeper.wait() == -signal.SIGTERM


def test_the_rest_of_a_group_is_signalled_after_its_leader_has_ended() -> None:
    read, write = os.pipe()
    leader = subprocess.Popen(["sh", "-c", "sleep 60 &"], stdout=write, start_new_session=True)
    found = processes.identify(leader.pid)
    assert found is not None
    os.close(write)
    leader.wait()
    assert processes.identify(leader.pid) is None
    processes.signal_group(found, signal.SIGKILL)
    assert select.select([read], [], [], 30)[0]  # no process holds the write end of the pipe any longer
    assert os.read(read, 1) == b""
    os.close(read)


def test_a_worker_is_killed_though_no_file_can_be_opened(sleeper: subprocess.Popen[bytes]) -> None:
    """It was considered killed, but lived on."""
    found = processes.identify(sleeper.pid)
    assert found is not None
    descriptor = os.pidfd_open(sleeper.pid)
    nothing = cast("Any", SimpleNamespace())
    worker = RunningWorker(nothing, found, nothing, None, nothing, -1, descriptor)
    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, allowed[1]))
    try:
        worker.signal(signal.SIGKILL)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, allowed)
        os.close(descriptor)
    assert sleeper.wait() == -signal.SIGKILL


def test_the_children_of_a_new_process_with_the_pid_of_a_container_are_not_killed(
    sleeper: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    ours = processes.identify(os.getpid())
    assert ours is not None
    assert sleeper.pid in processes.children_of(ours)
    gone = Process(ours.pid, ours.start_time - 1)
    nothing = cast("Any", SimpleNamespace())
    worker = RunningWorker(nothing, gone, nothing, None, nothing, -1, -1, container="c0ffee")
    assert worker.pids == [gone.pid]
    worker.signal(signal.SIGKILL)
    sleeper.send_signal(signal.SIGTERM)
    assert sleeper.wait() == -signal.SIGTERM


def test_the_writers_of_a_fifo_are_found_with_their_start_times(tmp_path: Path) -> None:
    fifo = tmp_path / "output"
    os.mkfifo(fifo)
    end = os.open(fifo, os.O_RDWR)
    writer = subprocess.Popen(["sleep", "60"], stdout=end)
    os.close(end)
    assert processes.writing_to(fifo) == [processes.identify(writer.pid)]
    writer.kill()
    writer.wait()
    assert processes.writing_to(fifo) == []


def test_descendants_and_members_of_a_session_are_recognized() -> None:
    # Popen returns after the exec: before it, the child may still be in the session of its parent.
    code = """
import subprocess, sys
child = subprocess.Popen(['sleep', '60'], start_new_session=sys.argv[1] == 'yes')
print(child.pid, flush=True)
child.wait()
"""
    for in_new_session in ("yes", "no"):
        command = [sys.executable, "-S", "-c", code, in_new_session]
        parent = subprocess.Popen(command, start_new_session=True, stdout=subprocess.PIPE)
        try:
            assert parent.stdout is not None
            grandchild = int(parent.stdout.readline())
            assert processes.descends_from(grandchild, {parent.pid})
            assert processes.descends_from(grandchild, {os.getpid()})
            assert not processes.descends_from(os.getpid(), {parent.pid})
            assert not processes.descends_from(1, {parent.pid})
        finally:
            parent.kill()
            parent.wait()
        parent.stdout.close()
        belongs = processes.descends_from(grandchild, {parent.pid})
        os.kill(grandchild, signal.SIGKILL)
        assert belongs == (in_new_session == "no"), "an orphan is known by its session"


def test_a_process_in_a_sandbox_is_recognized_by_its_output(tmp_path: Path) -> None:
    """Regression: the link of a descriptor has another path there, so a second process of a worker was not found."""
    if reason := probe().namespaces:
        missing(f"user namespaces: {reason}")
    output, folder = tmp_path / "w-1" / "output", os.fspath(tmp_path)
    output.parent.mkdir()
    os.mkfifo(output)
    ready, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            enter(Sandbox(writable=(folder,), is_template=True))
            os.dup2(os.open(output, os.O_RDWR), 1)
            enter(Sandbox(readable=(os.fspath(output.parent),)))
            os.write(writer, b"1")
            signal.pause()
        finally:
            os._exit(1)
    os.close(writer)
    try:
        assert os.read(ready, 1) == b"1"
        assert [process.pid for process in processes.writing_to(output)] == [child]
        assert processes.kill_worker(output, tmp_path / "scratch")
    finally:
        os.close(ready)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
