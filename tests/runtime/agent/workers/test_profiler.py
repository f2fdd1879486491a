"""Profiles of a process by py-spy, and why there is none."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from gpufn_core.errors import Conflict, GpufnError, InvalidInput, WorkerLost
from gpufn_core.protocol.profiles import ProfileRequest
from gpufn_runtime.agent.workers import processes, profiler
from gpufn_runtime.agent.workers.profiler import CannotProfile, Profiler, find_program
from tests.conftest import missing

SPIN = "def spin():\n    while True: pass\nprint('runs', flush=True)\nspin()"


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
