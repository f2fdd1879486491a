"""Records whose writes are stored at once, but acknowledged only when the test allows it."""

from __future__ import annotations

import asyncio
from typing import Any

from gpufn_platform.bus.storage.key_value import KeyValue


class LateAnswers(KeyValue):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.stored, self.may_answer = asyncio.Event(), asyncio.Event()

    async def update(self, *args: Any, **options: Any) -> int:
        revision = await super().update(*args, **options)
        self.stored.set()
        await self.may_answer.wait()
        return revision
