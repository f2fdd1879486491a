"""Waiting for something that is stored to change, without missing that it did.

A message on its subject is a sign to look again. It may be missed: a stream stores a message after it was handed to
subscribers, so who subscribes and looks in between gets neither. Therefore one looks again anyway, soon at first.
"""

from __future__ import annotations

import asyncio
import contextlib
from types import TracebackType
from typing import Final, Self

from gpufn_platform.bus.connection import Bus, Message

_SOON_S: Final = 0.1
_SELDOM_S: Final = 5.0


class Signs:
    """`async with Signs(bus, subject) as signs`, then in turn: look, and `await signs.next()`."""

    def __init__(self, bus: Bus, *subjects: str) -> None:
        self._bus = bus
        self._subjects = subjects
        self._seen = asyncio.Event()
        self._patience_s = _SOON_S
        self._stack = contextlib.ExitStack()

    async def next(self) -> None:
        """Returns at a sign that came since the last one was taken, or when it is time to look anyway."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._patience_s):
                await self._seen.wait()
        self._patience_s = _SOON_S if self._seen.is_set() else min(2 * self._patience_s, _SELDOM_S)
        self._seen.clear()

    def _on_sign(self, _: Message) -> None:
        self._seen.set()

    async def __aenter__(self) -> Self:
        for subject in self._subjects:
            self._stack.callback(self._bus.subscribe(subject, self._on_sign).unsubscribe)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self._stack.close()
