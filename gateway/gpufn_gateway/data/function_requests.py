"""Requests of functions for data, which runners pass on over the bus (`gpufn_core.protocol.data`)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from gpufn_core.protocol import codec, subjects
from gpufn_core.protocol.data import AdmitValue, CommitVolume, DataReply, DataRequest
from gpufn_core.spec.naming.names import home_of
from gpufn_core.spec.volume_spec import full_name_at
from gpufn_gateway.data.operations import Operations
from gpufn_gateway.responder import Responder
from gpufn_gateway.volumes.volumes import Volumes
from gpufn_platform.bus.connection import Bus

_unpack: codec.Unpacker[DataRequest] = codec.Unpacker(DataRequest)


class FunctionRequests:
    """Executes the requests. `sync` returns once the stored records are on disk."""

    def __init__(self, bus: Bus, volumes: Volumes, operations: Operations, sync: Callable[[], Awaitable[None]]) -> None:
        self._volumes = volumes
        self._operations = operations
        self._sync = sync
        self._responder = Responder(
            bus, subjects.DATA_REQUESTS, self._answer, lambda error: codec.pack(DataReply(error))
        )

    async def run(self) -> None:
        """Answer requests until cancelled."""
        subscription = self._responder.start()
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            subscription.unsubscribe()

    async def _answer(self, payload: bytes) -> bytes:
        request, value = _unpack(payload)
        content_type, body = await self.execute(request, value)
        return codec.pack(DataReply(content_type=content_type), body)

    async def execute(self, request: DataRequest, value: bytes) -> tuple[str, bytes]:
        """Return content type and value of the reply. Raises GpufnError."""
        operation = request.operation
        if isinstance(operation, AdmitValue):
            await self._operations.storage.admit(request.function, operation.size)
            return "", b""
        name = full_name_at(operation.name, home_of(request.function))
        if isinstance(operation, CommitVolume):
            version = await self._volumes.commit(name, operation.change)
            await self._sync()
            return "", codec.encode(version)
        content_type, body, is_change = await self._operations.execute(name, operation, value)
        if is_change:
            await self._sync()
        return content_type, body
