"""Requests of functions for data, which runners pass on over the bus (`gpufn_core.protocol.data`)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Final

from gpufn_core.errors import BusUnavailable, GpufnError, PlatformError, ProtocolMismatch
from gpufn_core.protocol import codec, subjects
from gpufn_core.protocol.data import CommitVolume, DataReply, DataRequest
from gpufn_core.spec.names import home_of
from gpufn_core.spec.volume_spec import full_name_at
from gpufn_gateway.data.operations import Operations
from gpufn_gateway.volumes.volumes import Volumes
from gpufn_platform.bus.connection import Bus, Message
from gpufn_platform.process.tasks import Tasks

log = logging.getLogger(__name__)

_QUEUE: Final = "gateways"

_unpack: codec.Unpacker[DataRequest] = codec.Unpacker(DataRequest)


class FunctionRequests:
    """Executes the requests. `sync` returns once the stored records are on disk."""

    def __init__(self, bus: Bus, volumes: Volumes, operations: Operations, sync: Callable[[], Awaitable[None]]) -> None:
        self._bus = bus
        self._volumes = volumes
        self._operations = operations
        self._sync = sync
        self._tasks = Tasks()

    async def run(self) -> None:
        """Answer requests until cancelled."""
        subscription = self._bus.subscribe(subjects.DATA_REQUESTS, self._on_message, queue=_QUEUE)
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            subscription.unsubscribe()

    def _on_message(self, message: Message) -> None:
        self._tasks.start(self._answer(message), "data request")

    async def _answer(self, message: Message) -> None:
        try:
            request, value = _unpack(message.payload)
            content_type, body = await self.execute(request, value)
            reply = codec.pack(DataReply(content_type=content_type), body)
        except (ProtocolMismatch, GpufnError) as error:
            reply = codec.pack(DataReply(error.info()))
        except Exception:
            log.exception("a request of a function for data failed")
            reply = codec.pack(DataReply(PlatformError().info()))
        try:
            self._bus.publish(message.reply, reply)
        except BusUnavailable:  # the runner sends the request again
            log.info("a reply to a function is lost: the bus is away")

    async def execute(self, request: DataRequest, value: bytes) -> tuple[str, bytes]:
        """Return content type and value of the reply. Raises GpufnError."""
        operation = request.operation
        name = full_name_at(operation.name, home_of(request.function))
        if isinstance(operation, CommitVolume):
            version = await self._volumes.commit(name, operation.change)
            await self._sync()
            return "", codec.encode(version)
        content_type, body, is_change = await self._operations.execute(name, operation, value)
        if is_change:
            await self._sync()
        return content_type, body
