"""Memory profiles: one at a time, answered by the worker that was asked, and ended with it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gpufn_core.errors import Conflict, GpufnError, InvalidInput, WorkerLost
from gpufn_core.protocol.frames import Trace
from gpufn_core.protocol.profiles import ProfileRequest
from gpufn_runtime.runner.workers.memory_profiles import MemoryProfiles


class Link:
    def __init__(self, *, peer: object) -> None:
        self.frames: list[Trace] = []
        self.peer = peer

    def send(self, frame: Trace) -> None:
        self.frames.append(frame)


def profiles_of(link: Any) -> MemoryProfiles:
    bus: Any = None
    return MemoryProfiles(bus, "node", {"w-1": link}.get)


def test_a_profile_is_the_answer_to_its_own_trace() -> None:
    async def scenario() -> tuple[str, Any]:
        link: Any = Link(peer=object())
        profiles = profiles_of(link)
        profiling = asyncio.create_task(profiles.profile(ProfileRequest("w-1", 1.0)))
        await asyncio.sleep(0)
        with pytest.raises(Conflict):
            await profiles.profile(ProfileRequest("w-1", 1.0))
        (trace,) = link.frames
        other: Any = Link(peer=object())
        profiles.on_traced(other, trace.number, b"other 1\n")  # nobody asked it
        profiles.on_traced(link, trace.number + 1, b"late 1\n")
        profiles.on_traced(link, trace.number, b"a:1 5\n")
        profiles.on_traced(link, trace.number, b"again 1\n")
        return await profiling, trace

    stacks, trace = asyncio.run(scenario())
    assert (stacks, trace.seconds) == ("a:1 5\n", 1.0)


@pytest.mark.parametrize(
    ("worker", "seconds", "error"), [("w-2", 1.0, WorkerLost), ("w-1", 61.0, InvalidInput), ("w-1", 1.0, WorkerLost)]
)
def test_why_there_is_no_profile(worker: str, seconds: float, error: type[GpufnError]) -> None:
    link: Any = Link(peer=None)  # it has disconnected
    with pytest.raises(error):
        asyncio.run(profiles_of(link).profile(ProfileRequest(worker, seconds)))
