"""A record whose bytes on the server's disk are damaged: all other records stay readable."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gpufn_local.nats_process import EmbeddedServer
from gpufn_platform.bus.storage import ordered_reader
from gpufn_platform.bus.storage.key_value import Entry, KeyValue
from tests.waiting import until_async

_DAMAGED = b"the record that is damaged"


@pytest.mark.parametrize("which", ["a", "b", "c"])
async def test_a_damaged_record_is_missing_and_reported_and_blocks_no_other(
    which: str,
    *,
    connect: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(ordered_reader, "_HEARTBEAT_S", 1)
    with EmbeddedServer.start(tmp_path) as server:
        kv = await KeyValue.open(await connect(server), "records")
        for key in "abc":
            await kv.put(key, _DAMAGED if key == which else b"whole")
    _damage(tmp_path)
    known: dict[str, Entry | None] = {}
    with EmbeddedServer.start(tmp_path) as server:
        kv = await KeyValue.open(await connect(server), "records")
        watch = await kv.watch(known.__setitem__)
        whole = sorted({"a", "b", "c"} - {which})
        assert sorted(known) == await kv.keys() == whole
        told = f"records/{which} is damaged on the disk of the message bus, and missing here"
        await until_async(lambda: caplog.messages.count(told) == 1)
        watch.stop()


def _damage(folder: Path) -> None:
    [block] = folder.glob("jetstream/*/streams/KV_records/msgs/*.blk")
    stored = block.read_bytes()
    assert stored.count(_DAMAGED) == 1
    block.write_bytes(stored.replace(_DAMAGED, _DAMAGED[::-1]))
