from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gpufn_core.errors import BusUnavailable
from gpufn_platform.bus.leader_lease import LeaderLease
from gpufn_platform.bus.storage.key_value import KeyValue
from tests.platform.late_answers import LateAnswers
from tests.waiting import until_async


async def holder(kv: KeyValue) -> bytes | None:
    entry = await kv.get("controller")
    return None if entry is None else entry.value


async def test_one_holds_it_renews_it_and_hands_it_on(connect: Any, nats: Any) -> None:
    kv = await KeyValue.open(await connect(nats), "leases")
    first, second = LeaderLease(kv, "controller", "a"), LeaderLease(kv, "controller", "b")
    assert await first.try_acquire(0)
    epoch = first.epoch
    assert not await second.try_acquire(0)
    assert await first.try_acquire(2)
    assert (first.epoch, first.is_held(6.9), first.is_held(7.0), await holder(kv)) == (epoch, True, False, b"a")
    await first.release()
    assert not first.is_held(3)
    assert await second.try_acquire(3)
    assert second.epoch > epoch
    await first.release()  # does not release another holder's lease
    assert await holder(kv) == b"b"


async def test_a_term_that_is_not_renewed_ends_and_its_old_holder_begins_a_new_one(connect: Any, nats: Any) -> None:
    kv = await KeyValue.open(await connect(nats), "expiring")
    first, second = LeaderLease(kv, "l", "a", ttl_s=1), LeaderLease(kv, "l", "b", ttl_s=1)
    assert await first.try_acquire(0)
    old = first.epoch
    while not await second.try_acquire(1):
        pass
    assert second.epoch > old
    assert not await first.try_acquire(2)
    await second.release()
    assert await first.try_acquire(2)
    assert first.epoch > second.epoch


async def test_a_renewal_whose_answer_was_lost_is_recognised_as_our_own(connect: Any, nats: Any) -> None:
    kv = await KeyValue.open(await connect(nats), "lost")
    lease = LeaderLease(kv, "l", "a")
    await kv.create("l", b"a", ttl_s=5)  # the first attempt, from the server's view
    assert await lease.try_acquire(0)
    epoch = lease.epoch
    await kv.put("l", b"a")
    assert await lease.try_acquire(1)
    assert lease.epoch == epoch
    await kv.put("l", b"b")
    assert not await lease.try_acquire(2)


@pytest.mark.parametrize("renewals", [0, 1])
async def test_a_term_is_ended_though_its_last_write_was_cut_off_midway(connect: Any, nats: Any, renewals: int) -> None:
    kv = await LateAnswers.open(await connect(nats), f"cut-off-{renewals}")
    lease = LeaderLease(kv, "l", "a")
    kv.may_answer.set()
    for now in range(renewals):
        assert await lease.try_acquire(now)
    kv.may_answer.clear()
    kv.stored.clear()
    writing = asyncio.create_task(lease.try_acquire(1))
    await kv.stored.wait()
    writing.cancel()
    await asyncio.gather(writing, return_exceptions=True)
    ending = asyncio.create_task(lease.release())
    await asyncio.sleep(0)
    kv.may_answer.set()
    await ending
    assert await kv.get("l") is None


async def test_while_the_bus_is_away_a_term_lasts_to_its_end(connect: Any, crash: Any) -> None:
    bus = await connect(crash.server)
    lease = LeaderLease(await KeyValue.open(bus, "leases"), "l", "a")
    assert await lease.try_acquire(0)
    crash.server.kill()
    await until_async(lambda: not bus.connected)
    assert await lease.try_acquire(4.9)
    with pytest.raises(BusUnavailable):
        await lease.try_acquire(5.0)
    assert not lease.is_held(5.0)
