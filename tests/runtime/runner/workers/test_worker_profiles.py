"""Profiles that workers record: one at a time, from the requested worker only, and ended with that worker."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gpufn_core.errors import Conflict, GpufnError, InvalidInput, WorkerLost
from gpufn_core.protocol.frames import Trace, Traced
from gpufn_core.protocol.profiles import ProfileKind, ProfileRequest
from gpufn_runtime.runner.workers import worker_profiles
from gpufn_runtime.runner.workers.worker_profiles import WorkerProfiles


class Link:
    def __init__(self, *, peer: object) -> None:
        self.frames: list[Trace] = []
        self.peer = peer

    def send(self, frame: Trace) -> None:
        self.frames.append(frame)


def profiles_of(link: Any) -> WorkerProfiles:
    bus: Any = None
    return WorkerProfiles(bus, "node", {"w-1": link}.get)


def test_a_profile_is_the_answer_to_its_own_trace() -> None:
    async def scenario() -> tuple[bytes, Any]:
        link: Any = Link(peer=object())
        profiles = profiles_of(link)
        profiling = asyncio.create_task(profiles.profile(ProfileRequest("w-1", 1.0)))
        await asyncio.sleep(0)
        with pytest.raises(Conflict):
            await profiles.profile(ProfileRequest("w-1", 1.0))
        (trace,) = link.frames
        other: Any = Link(peer=object())
        profiles.on_traced(other, Traced(trace.number), b"other 1\n")  # no request went to this worker
        profiles.on_traced(link, Traced(trace.number + 1), b"late 1\n")
        profiles.on_traced(link, Traced(trace.number), b"a:1 5\n")
        profiles.on_traced(link, Traced(trace.number), b"again 1\n")
        return await profiling, trace

    stacks, trace = asyncio.run(scenario())
    assert (stacks, trace) == (b"a:1 5\n", Trace(1, 1.0))


@pytest.mark.parametrize(
    ("worker", "seconds", "error"), [("w-2", 1.0, WorkerLost), ("w-1", 61.0, InvalidInput), ("w-1", 1.0, WorkerLost)]
)
def test_why_there_is_no_profile(worker: str, seconds: float, error: type[GpufnError]) -> None:
    link: Any = Link(peer=None)  # it has disconnected
    with pytest.raises(error):
        asyncio.run(profiles_of(link).profile(ProfileRequest(worker, seconds)))


async def _asked(link: Any, kind: ProfileKind) -> tuple[WorkerProfiles, asyncio.Task[bytes]]:
    profiles = profiles_of(link)
    profiling = asyncio.create_task(profiles.profile(ProfileRequest("w-1", 1.0, kind=kind)))
    await asyncio.sleep(0)
    return profiles, profiling


def test_the_error_of_a_worker_is_that_of_its_profile() -> None:
    async def scenario() -> None:
        link: Any = Link(peer=object())
        profiles, profiling = await _asked(link, ProfileKind.GPU)
        assert link.frames == [Trace(1, 1.0, is_gpu=True)]
        profiles.on_traced(link, Traced(1, Conflict("it has no torch").info()), b"")
        with pytest.raises(Conflict, match="no torch"):
            await profiling

    asyncio.run(scenario())


@pytest.mark.parametrize(("kind", "most"), [(ProfileKind.GPU, 7 << 20), (ProfileKind.MEMORY, 1 << 20)])
def test_a_profile_that_is_too_large_is_refused(kind: ProfileKind, most: int) -> None:
    """Bug: the runner sorted stacks of any size in its event loop, which all calls of the node need."""

    async def scenario(size: int) -> int:
        link: Any = Link(peer=object())
        profiles, profiling = await _asked(link, kind)
        profiles.on_traced(link, Traced(1), bytes(size))
        return len(await profiling)

    assert asyncio.run(scenario(most)) == most
    with pytest.raises(Conflict, match="too large"):
        asyncio.run(scenario(most + 1))


def test_a_worker_that_ends_during_its_profile_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_profiles, "_CHECK_S", 0.0)

    async def scenario() -> None:
        link: Any = Link(peer=object())
        _, profiling = await _asked(link, ProfileKind.GPU)
        link.peer = None
        with pytest.raises(WorkerLost):
            await profiling

    asyncio.run(scenario())
