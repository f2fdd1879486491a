"""Wait for stored data to change, without missing changes.

A message on the data's subject signals that the reader should check again. A signal can be missed: the server delivers
a message to subscribers before the stream stores it, so a reader that subscribes and reads in between sees neither.
Therefore the reader also checks again after a timeout, which is short at first.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Final, Self

from gpufn_platform.bus.connection import Bus, Message

_FIRST_TIMEOUT_S: Final = 0.1
_LONGEST_TIMEOUT_S: Final = 5.0


class ChangeSignal:
    """`async with ChangeSignal(bus, subject) as changes`, then repeatedly: check, and `await changes.next()`."""

    def __init__(self, bus: Bus, *subjects: str) -> None:
        self._bus = bus
        self._subjects = subjects
        self._signaled = asyncio.Event()
        self._timeout_s = _FIRST_TIMEOUT_S
        self._stack = contextlib.ExitStack()

    async def next(self) -> None:
        """Return on a message that arrived since the previous call, or when the timeout for the next check expires."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._timeout_s):
                await self._signaled.wait()
        self._timeout_s = _FIRST_TIMEOUT_S if self._signaled.is_set() else min(2 * self._timeout_s, _LONGEST_TIMEOUT_S)
        self._signaled.clear()

    def _on_message(self, _: Message) -> None:
        self._signaled.set()

    async def __aenter__(self) -> Self:
        for subject in self._subjects:
            self._stack.callback(self._bus.subscribe(subject, self._on_message).unsubscribe)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._stack.close()
