"""Arrivals on a running platform: a call reaches the stored history, and the record ends with its function."""

from __future__ import annotations

import asyncio
import contextlib
import time
from pathlib import Path

import pytest

from gpufn_core.protocol import subjects
from gpufn_gateway.controller.decide.scaling.prewarm import ArrivalHistory, slot_of
from gpufn_platform.bus.connection import Bus
from gpufn_platform.bus.storage.key_value import Entry, KeyValue
from tests.conftest import Platform
from tests.e2e.chaos.gateway import embedded_bus

pytestmark = pytest.mark.e2e

APP = """
from gpufn import gpu_function

@gpu_function(prewarm=True)
def usual() -> int:
    return 1

@gpu_function
def unusual() -> int:
    return 1
"""


def test_calls_reach_the_stored_history_which_ends_with_the_function(platform: Platform, tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(APP)
    platform.gpufn("deploy", tmp_path / "app.py")

    async def scene() -> None:
        bus = await Bus.connect(embedded_bus(platform.home, "admin"), name="test")
        records: dict[str, Entry | None] = {}
        changed = asyncio.Event()

        def on_change(key: str, entry: Entry | None) -> None:
            records[key] = entry
            changed.set()

        async def next_change() -> None:
            async with asyncio.timeout(30):
                await changed.wait()
            changed.clear()

        watch = await KeyValue(bus, subjects.ARRIVALS).watch(on_change)
        try:
            called_in = slot_of(time.time())
            platform.invoke("unusual")
            # A call that is reported before the controller knows that its function has `prewarm` does not count.
            while not changed.is_set():
                platform.invoke("usual")
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(3):
                        await changed.wait()
            changed.clear()
            entry = records["usual"]
            assert entry is not None
            history = ArrivalHistory.decode(entry.value)
            assert history.has_call(called_in) or history.has_call(called_in + 1)
            assert "unusual" not in records
            platform.client.delete("/v1/functions/usual").raise_for_status()
            await next_change()
            assert records["usual"] is None
        finally:
            watch.stop()
            await bus.close()
            platform.client.delete("/v1/functions/usual")
            platform.client.delete("/v1/functions/unusual")

    asyncio.run(scene())
