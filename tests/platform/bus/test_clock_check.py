"""A node's clock against a real server's, with the permissions of an agent."""

from __future__ import annotations

import logging
import time
from typing import Any

import pytest

from gpufn_core.protocol import subjects
from gpufn_platform.bus.storage.key_value import KeyValue, stream_of
from gpufn_runtime.agent.clock_check import ClockCheck


class _Clock:
    def __init__(self) -> None:
        self.ahead_s = 0.0

    def monotonic(self) -> float:
        return 0.0

    def time(self) -> float:
        return time.time() + self.ahead_s


async def test_a_skewed_clock_is_measured_and_logged_once_per_change(
    connect: Any, nats: Any, caplog: pytest.LogCaptureFixture
) -> None:
    await KeyValue.open(await connect(nats), subjects.ASSIGNMENTS)
    bus, clock = await connect(nats, "agent"), _Clock()
    check = ClockCheck(bus, stream_of(subjects.ASSIGNMENTS), node="n1", clock=clock)
    caplog.set_level(logging.INFO, "gpufn_runtime.agent.clock_check")
    assert check.skew_s is None
    for ahead_s in (0.0, 100.0, 100.0, 0.0, -100.0):
        clock.ahead_s = ahead_s
        await check.measure(0.0)
        assert check.skew_s == pytest.approx(ahead_s, abs=0.6)
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO", "WARNING"]
    assert all(word in caplog.messages[0] for word in ("node n1", "ahead of", "NTP"))
    await bus.close()
    await check.measure(0.0)
    assert check.skew_s is None
