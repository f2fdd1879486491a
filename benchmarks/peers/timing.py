"""Time from the first submission until all results are stored, printed as one line of JSON."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable

_LOOK_EVERY_S = 0.02


def report(calls: int, submit: Callable[[], None], results: Callable[[], int]) -> None:
    async def submitted() -> None:
        submit()

    async def stored() -> int:
        return results()

    asyncio.run(report_async(calls, submitted, stored))


async def report_async(
    calls: int, submit: Callable[[], Awaitable[None]], results: Callable[[], Awaitable[int]]
) -> None:
    before = await results()
    start = time.perf_counter()
    await submit()
    submit_s = time.perf_counter() - start
    while await results() < before + calls:  # noqa: ASYNC110
        await asyncio.sleep(_LOOK_EVERY_S)
    total_s = time.perf_counter() - start
    print(json.dumps({"submit_s": submit_s, "total_s": total_s, "cpu_s": time.process_time()}))
