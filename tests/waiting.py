"""Waits for conditions that come true by themselves."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any, Final

WITHIN_S: Final = 60.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.01, 0.1  # a look often costs a request, and the tests share few cores


def until(condition: Callable[[], Any], what: str | Callable[[], object] = "", *, within_s: float = WITHIN_S) -> Any:
    """Wait until `condition` is true. Return its value. `what` is its description, or a function that returns it."""
    give_up, pause_s = time.monotonic() + within_s, _FIRST_PAUSE_S
    while not (value := condition()):
        assert time.monotonic() < give_up, f"not within {within_s:g} s: {what() if callable(what) else what}"
        time.sleep(pause_s)
        pause_s = min(pause_s * 1.5, _LONGEST_PAUSE_S)
    return value


async def until_async(condition: Callable[[], Any], *, within_s: float = WITHIN_S) -> Any:
    async with asyncio.timeout(within_s):
        while not (value := condition()):  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    return value
