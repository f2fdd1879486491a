"""Startup of the gateway while the bus elects leaders."""

from __future__ import annotations

import contextlib
from typing import Any, cast

import pytest

from gpufn_core.errors import BusUnavailable
from gpufn_gateway.composition import services


async def test_a_gateway_that_meets_an_election_starts_again_from_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    async def open_at_last(settings: Any, stack: contextlib.AsyncExitStack) -> str:
        number = len(seen) // 2
        seen.append(f"open {number}")
        stack.callback(seen.append, f"close {number}")
        if number < 2:
            raise BusUnavailable("KV_gpufn_functions has no leader")
        return "opened"

    monkeypatch.setattr(services, "_open", open_at_last)
    monkeypatch.setattr(services, "_RETRY_DELAY_S", 0.0)
    async with contextlib.AsyncExitStack() as stack:
        assert cast("Any", await services.open_with_retry(cast("Any", None), stack)) == "opened"
        assert seen == ["open 0", "close 0", "open 1", "close 1", "open 2"]
    assert seen[-1] == "close 2"


async def test_a_bus_that_never_elects_ends_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    async def never(settings: Any, stack: contextlib.AsyncExitStack) -> None:
        raise BusUnavailable("no leader")

    monkeypatch.setattr(services, "_open", never)
    monkeypatch.setattr(services, "_ELECTION_TIMEOUT_S", 0.0)
    async with contextlib.AsyncExitStack() as stack:
        with pytest.raises(BusUnavailable, match="no leader"):
            await services.open_with_retry(cast("Any", None), stack)
