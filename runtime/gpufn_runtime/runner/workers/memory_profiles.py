"""Memory profiles of this runner's workers, which trace themselves. One at a time per worker."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Final

import msgspec

from gpufn_core.domain.profile import shortened
from gpufn_core.errors import BusUnavailable, Conflict, GpufnError, InvalidInput, WorkerLost
from gpufn_core.protocol import frames, subjects
from gpufn_core.protocol.codec import encode
from gpufn_core.protocol.profiles import LONGEST_PROFILE_S, MAX_STACKS_BYTES, ProfileReply, ProfileRequest
from gpufn_platform.bus.connection import Bus, Message
from gpufn_platform.process.tasks import Tasks
from gpufn_runtime.runner.workers.worker_link import WorkerLink

_CHECK_S: Final = 0.5
_EXTRA_S: Final = 20.0  # for the worker to read its memory
_request = msgspec.msgpack.Decoder(ProfileRequest)


class MemoryProfiles:
    """`find` returns the link of a worker that is READY here."""

    def __init__(self, bus: Bus, node: str, find: Callable[[str], WorkerLink | None]) -> None:
        self._bus = bus
        self._node = node
        self._find = find
        self._running: dict[WorkerLink, tuple[int, asyncio.Future[str]]] = {}
        self._last = 0
        self._tasks = Tasks("memory profile")

    def start(self) -> None:
        self._bus.subscribe(subjects.memory_profile(self._node), self._on_message)

    def on_traced(self, link: WorkerLink, number: int, body: bytes) -> None:
        """Handle the end of a trace. One that nobody waits for any more is ignored."""
        expected, future = self._running.get(link, (0, None))
        if future is not None and number == expected and not future.done():
            future.set_result(body.decode(errors="replace"))

    def _on_message(self, message: Message) -> None:
        self._tasks.start(self._respond(message))

    async def _respond(self, message: Message) -> None:
        try:
            stacks = await self.profile(_request.decode(message.payload))
            reply = ProfileReply(shortened(stacks, MAX_STACKS_BYTES))
        except GpufnError as error:
            reply = ProfileReply(error=error.info())
        with contextlib.suppress(BusUnavailable):  # the gateway reports a timeout
            self._bus.publish(message.reply, encode(reply))

    async def profile(self, request: ProfileRequest) -> str:
        """Return the folded stacks. Raises WorkerLost, Conflict, InvalidInput."""
        if not 0 < request.seconds <= LONGEST_PROFILE_S:
            raise InvalidInput(f"a profile takes at most {LONGEST_PROFILE_S:g} s", field="seconds")
        link = self._find(request.worker)
        if link is None:
            raise WorkerLost(f"The worker {request.worker} is not ready, or has ended.")
        if link in self._running:
            raise Conflict(f"The worker {request.worker} is being profiled: try again when that has ended.")
        self._last += 1
        loop = asyncio.get_running_loop()
        future: asyncio.Future[str] = loop.create_future()
        self._running[link] = self._last, future
        try:
            link.send(frames.Trace(self._last, request.seconds))
            deadline = loop.time() + request.seconds + _EXTRA_S
            while not future.done():
                await asyncio.wait([future], timeout=_CHECK_S)
                if link.peer is None or (not future.done() and loop.time() > deadline):
                    raise WorkerLost(f"The worker {request.worker} ended, or did not answer, while it was profiled.")
            return future.result()
        finally:
            del self._running[link]
