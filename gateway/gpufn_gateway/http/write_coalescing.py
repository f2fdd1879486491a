"""An answer's head and its body in one write.

uvicorn writes the one, then the other: two system calls, two packets, and a client that wakes twice for one answer.
Here the first of two writes waits for the second, at most until the turn of the loop ends.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

_COPIED_BYTES: Final = 64 << 10  # larger bodies go as they are, after the head


class JoinedWrites:
    """A transport; all that is not here is as the one underneath does it."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._loop = asyncio.get_running_loop()
        self._held: bytes | memoryview = b""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes | memoryview) -> None:
        if not self._held:
            self._held = data
            self._loop.call_soon(self._flush)
            return
        held, self._held = self._held, b""
        if len(data) <= _COPIED_BYTES:
            self._transport.write(b"".join((held, data)))
        else:
            self._transport.writelines((held, data))

    def close(self) -> None:
        self._flush()
        self._transport.close()

    def _flush(self) -> None:
        held, self._held = self._held, b""
        if held and not self._transport.is_closing():
            self._transport.write(held)
