"""Profiles that workers record themselves, of memory and of the GPU. One at a time per worker."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Final

import msgspec

from gpufn_core.domain.profiles.stacks import shortened
from gpufn_core.errors import BusUnavailable, Conflict, GpufnError, InvalidInput, WorkerLost, error_from
from gpufn_core.protocol import frames, subjects
from gpufn_core.protocol.codec import encode
from gpufn_core.protocol.profiles import (
    GPU_EXTRA_S,
    LONGEST_PROFILE_S,
    MAX_STACKS_BYTES,
    MAX_TRACE_BYTES,
    ProfileKind,
    ProfileReply,
    ProfileRequest,
)
from gpufn_core.spec.units import format_bytes
from gpufn_platform.bus.connection import Bus, Message
from gpufn_platform.process.tasks import Tasks
from gpufn_runtime.runner.workers.worker_link import WorkerLink

_CHECK_S: Final = 0.5
_EXTRA_S: Final = 20.0  # for the worker to read its memory
_MAX_STACKS_OF_WORKER: Final = 2 * MAX_STACKS_BYTES  # it shortens them; more would delay the calls of the node
_request = msgspec.msgpack.Decoder(ProfileRequest)


class WorkerProfiles:
    """`find` returns the link of a worker that is READY here."""

    def __init__(self, bus: Bus, node: str, find: Callable[[str], WorkerLink | None]) -> None:
        self._bus = bus
        self._node = node
        self._find = find
        self._running: dict[WorkerLink, tuple[int, asyncio.Future[bytes]]] = {}
        self._last = 0
        self._tasks = Tasks("profile of a worker")

    def start(self) -> None:
        self._bus.subscribe(subjects.worker_profile(self._node), self._on_message)

    def on_traced(self, link: WorkerLink, traced: frames.Traced, body: bytes) -> None:
        """Handle the end of a trace. Ignore it if its request has ended."""
        expected, future = self._running.get(link, (0, None))
        if future is None or traced.number != expected or future.done():
            return
        if traced.error is None:
            future.set_result(bytes(body))
        else:
            future.set_exception(error_from(traced.error))

    def _on_message(self, message: Message) -> None:
        self._tasks.start(self._respond(message))

    async def _respond(self, message: Message) -> None:
        try:
            reply = await self._reply(_request.decode(message.payload))
        except GpufnError as error:
            reply = ProfileReply(error=error.info())
        try:
            self._bus.publish(message.reply, encode(reply))
        except BusUnavailable:
            pass  # the gateway reports a timeout
        except GpufnError as error:  # larger than a message of this bus
            with contextlib.suppress(BusUnavailable):
                self._bus.publish(message.reply, encode(ProfileReply(error=error.info())))

    async def _reply(self, request: ProfileRequest) -> ProfileReply:
        body = await self.profile(request)
        if request.kind is ProfileKind.GPU:
            return ProfileReply(trace=body)
        return ProfileReply(shortened(body.decode(errors="replace"), MAX_STACKS_BYTES))

    async def profile(self, request: ProfileRequest) -> bytes:
        """Return the folded stacks, or the trace of the GPU. Raises WorkerLost, Conflict, InvalidInput."""
        if not 0 < request.seconds <= LONGEST_PROFILE_S:
            raise InvalidInput(f"a profile takes at most {LONGEST_PROFILE_S:g} s", field="seconds")
        link = self._find(request.worker)
        if link is None:
            raise WorkerLost(f"The worker {request.worker} is not ready, or has ended.")
        if link in self._running:
            raise Conflict(f"The worker {request.worker} is being profiled: try again when that has ended.")
        self._last += 1
        is_gpu = request.kind is ProfileKind.GPU
        loop = asyncio.get_running_loop()
        future: asyncio.Future[bytes] = loop.create_future()
        self._running[link] = self._last, future
        try:
            link.send(frames.Trace(self._last, request.seconds, is_gpu))
            deadline = loop.time() + request.seconds + (GPU_EXTRA_S if is_gpu else _EXTRA_S)
            while not future.done():
                await asyncio.wait([future], timeout=_CHECK_S)
                if link.peer is None or (not future.done() and loop.time() > deadline):
                    future.cancel()
                    raise WorkerLost(f"The worker {request.worker} ended, or did not answer, while it was profiled.")
            body = future.result()
        finally:
            del self._running[link]
        if len(body) > (MAX_TRACE_BYTES if is_gpu else _MAX_STACKS_OF_WORKER):
            raise Conflict(f"The worker {request.worker} sent a profile that is too large: {format_bytes(len(body))}.")
        return body
