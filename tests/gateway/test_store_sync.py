"""Shared disk syncs, and the blocks that a sync checks."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from pathlib import Path

import pytest

from gpufn_core.errors import BusUnavailable
from gpufn_gateway import store_sync
from gpufn_gateway.settings import GatewaySettings
from gpufn_gateway.store_sync import StoreSync, _SharedSync
from gpufn_platform.process.settings import InvalidSetting


def test_a_request_during_a_sync_waits_for_the_next() -> None:
    begun, may_end = threading.Semaphore(0), threading.Semaphore(0)
    syncs: list[int] = []

    def sync() -> None:
        syncs.append(len(syncs))
        begun.release()
        may_end.acquire()

    async def scenario() -> None:
        shared = _SharedSync(sync)
        first = asyncio.create_task(shared.wait())
        await asyncio.to_thread(begun.acquire)
        late = [asyncio.create_task(shared.wait()) for _ in range(5)]
        may_end.release()
        await first
        await asyncio.to_thread(begun.acquire)
        assert not any(task.done() for task in late)
        may_end.release()
        await asyncio.gather(*late)
        assert len(syncs) == 2

    asyncio.run(scenario())


def test_a_failed_disk_fails_the_present_waiters_and_not_later_ones() -> None:
    errors = [OSError(errno.EIO, os.strerror(errno.EIO))]

    def sync() -> None:
        if errors:
            raise errors.pop()

    async def scenario() -> None:
        shared = _SharedSync(sync)
        with pytest.raises(BusUnavailable, match="Input/output error"):
            await shared.wait()
        await shared.wait()

    asyncio.run(scenario())


def test_an_accepted_call_syncs_the_blocks_that_changed_and_folders_with_new_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "jetstream" / "$G" / "streams" / "GPUFN_ASYNC" / "msgs"
    folder.mkdir(parents=True)
    for number, written in (("1", 1_000), ("2", 2_000)):
        (folder / f"{number}.blk").write_bytes(b"?")
        os.utime(folder / f"{number}.blk", (written, written))
    synced: list[str] = []
    monkeypatch.setattr(store_sync, "_sync", lambda path, _: synced.append(os.path.basename(path)))

    async def scenario() -> None:
        disk = StoreSync(tmp_path, waits=True)
        await disk.sync_calls()
        assert sorted(synced) == ["1.blk", "2.blk", "msgs"]
        synced.clear()
        (folder / "2.blk").write_bytes(b"more")  # just now: it is checked again until its mtime is old enough
        for _ in range(2):
            await disk.sync_calls()
        assert synced == ["2.blk", "2.blk"]

    asyncio.run(scenario())


def test_recorded_writes_are_synced_and_a_bus_without_a_local_store_is_not(tmp_path: Path) -> None:
    async def scenario() -> None:
        await StoreSync(tmp_path, waits=False).sync_records()
        elsewhere = StoreSync(None, waits=True)
        await elsewhere.sync_calls()
        await elsewhere.sync_records()
        with pytest.raises(BusUnavailable, match="disk"):
            await StoreSync(tmp_path / "gone", waits=False).sync_records()

    asyncio.run(scenario())


@pytest.mark.parametrize("text", ["sometimes", "2", "0s", "1ms", "1h", "-1s"])
def test_a_setting_that_is_no_sync_is_refused(text: str) -> None:
    with pytest.raises(InvalidSetting, match=r"GPUFN_SYNC.*always, never"):
        GatewaySettings.from_env({"GPUFN_SYNC": text, "GPUFN_NATS_STORE": "/x"})


def test_a_sync_that_the_gateway_cannot_make_is_refused() -> None:
    with pytest.raises(InvalidSetting, match="sync_interval"):
        GatewaySettings.from_env({"GPUFN_SYNC": "always"})
    assert GatewaySettings.from_env({"GPUFN_SYNC": "500ms", "GPUFN_NATS_STORE": "/x"}).sync.interval_s == 0.5
