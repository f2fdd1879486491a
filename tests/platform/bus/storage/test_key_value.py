from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gpufn_core.errors import Conflict, QueueFull
from gpufn_platform.bus.storage import streams
from gpufn_platform.bus.storage.key_value import Entry, KeyValue, Watch
from tests.waiting import until_async


async def test_records_are_put_read_and_deleted(connect: Any, nats: Any) -> None:
    kv = await KeyValue.open(await connect(nats), "records")
    assert await kv.get("a") is None
    revision = await kv.put("a", b"1")
    assert await kv.get("a") == Entry("a", b"1", revision)
    await kv.delete("a")
    assert await kv.get("a") is None
    await kv.put("n1.w1", b"x")
    await kv.put("n1.w2", b"y")
    await kv.put("n10.w1", b"z")
    assert await kv.keys("n1.") == ["n1.w1", "n1.w2"]
    assert await kv.keys("n1") == ["n1.w1", "n1.w2", "n10.w1"]
    assert [entry.value for entry in await kv.entries()] == [b"x", b"y", b"z"]


async def test_compare_and_set_lets_one_writer_win(connect: Any, nats: Any) -> None:
    kv = await KeyValue.open(await connect(nats), "cas")
    outcomes = await asyncio.gather(*(kv.create("a", b"%d" % n) for n in range(8)), return_exceptions=True)
    won = [outcome for outcome in outcomes if isinstance(outcome, int)]
    assert (len(won), {type(outcome) for outcome in outcomes}) == (1, {int, Conflict})
    second = await kv.update("a", b"2", won[0])
    for stale in (won[0], 0):
        with pytest.raises(Conflict):
            await kv.update("a", b"3", stale)
    with pytest.raises(Conflict):
        await kv.delete("a", won[0])
    await kv.delete("a", second)
    assert await kv.create("a", b"4") > second


async def test_a_change_includes_concurrent_changes_of_others(connect: Any, nats: Any) -> None:
    kv = await KeyValue.open(await connect(nats), "changes")

    def one_more(entry: Entry | None) -> bytes:
        return b"1" if entry is None else b"%d" % (int(entry.value) + 1)

    await asyncio.gather(*(kv.change("a", one_more) for _ in range(8)))
    changed = await kv.get("a")
    assert changed is not None
    assert changed.value == b"8"
    assert await kv.change("a", lambda entry: entry.value if entry else b"") == changed
    await kv.delete("a")
    assert (await kv.change("a", one_more)).value == b"1"


async def test_a_change_that_others_always_beat_ends_in_a_conflict(connect: Any, nats: Any) -> None:
    class Beaten(KeyValue):
        async def update(self, key: str, value: bytes, revision: int | None, **_: Any) -> int:
            raise Conflict("somebody else was quicker")

    bus = await connect(nats)
    await (await KeyValue.open(bus, "beaten")).put("a", b"1")
    with pytest.raises(Conflict, match=r"^beaten/a "):
        await (await Beaten.open(bus, "beaten")).change("a", lambda entry: b"2")


async def test_nothing_is_left_of_a_record_that_was_deleted(connect: Any, nats: Any) -> None:
    """There is one key for each worker that ever ran."""
    bus = await connect(nats)
    kv = await KeyValue.open(bus, "leavings")
    told: list[tuple[str, bool]] = []
    watch = await kv.watch(lambda key, entry: told.append((key, entry is None)))
    await kv.put("n1.w1", b"x")
    await kv.delete("n1.w1", marked_s=1.0)
    while await streams.messages_per_subject(bus, kv.stream):
        await bus.flush()
    assert told == [("n1.w1", False), ("n1.w1", True)]
    await kv.create("n1.w1", b"y")
    await until_async(lambda: told[-1] == ("n1.w1", False))
    watch.stop()


async def test_a_bucket_of_an_older_release_is_brought_up_to_date(connect: Any, nats: Any) -> None:
    bus = await connect(nats)
    older = {"subjects": ["$KV.older.>"], "storage": "file", "max_msgs_per_subject": 1, "discard": "new"}
    older |= {"deny_delete": True, "allow_rollup_hdrs": True, "allow_direct": True, "allow_msg_ttl": True}
    await bus.js("STREAM.CREATE.KV_older", {"name": "KV_older", **older})
    await bus.publish_stored("$KV.older.a", b"1")
    kv = await KeyValue.open(bus, "older")
    with pytest.raises(QueueFull):
        await bus.publish_stored("$KV.older.a", b"an answer of the server")
    entry = await kv.get("a")
    assert entry is not None
    assert entry.value == b"1"
    await kv.update("a", b"2", entry.revision)
    await kv.delete("a")
    await kv.create("a", b"3")
    assert [each.value for each in await kv.entries()] == [b"3"]


@pytest.mark.parametrize("key", ["", ".a", "a.", "a..b", "a b", "a*", "a.>", "ä"])
async def test_an_invalid_key_is_refused(connect: Any, nats: Any, key: str) -> None:
    kv = await KeyValue.open(await connect(nats), "records")
    with pytest.raises(ValueError, match="not a key"):
        await kv.put(key, b"")


async def test_a_watch_reports_existing_records_then_every_change(connect: Any, nats: Any) -> None:
    bus = await connect(nats)
    kv = await KeyValue.open(bus, "watched")
    for key in ("n.a", "n.b", "m.c"):
        await kv.put(key, b"1")
    await kv.delete("n.b")
    told: list[tuple[str, bytes | None]] = []

    def on_change(key: str, entry: Entry | None) -> None:
        told.append((key, entry.value if entry else None))
        raise RuntimeError("a watcher's own trouble")

    watch = await kv.watch(on_change, prefix="n.")
    assert told == [("n.a", b"1")]
    await kv.put("n.a", b"2")
    await kv.put("m.c", b"2")
    await kv.delete("n.a")
    await until_async(lambda: len(told) == 3)
    assert told[1:] == [("n.a", b"2"), ("n.a", None)]
    watch.stop()
    await kv.put("n.a", b"3")
    await bus.flush()
    assert len(told) == 3


async def test_a_watch_of_an_empty_bucket_starts(connect: Any, nats: Any) -> None:
    kv = await KeyValue.open(await connect(nats), "empty")
    told: list[str] = []
    watch = await kv.watch(lambda key, entry: told.append(key))
    await kv.put("a", b"")
    await until_async(lambda: told)
    watch.stop()


async def test_a_watch_sends_own_writes_once_and_as_soon_as_they_are_stored(connect: Any, nats: Any) -> None:
    bus = await connect(nats)
    kv, elsewhere = await KeyValue.open(bus, "own"), await KeyValue.open(bus, "own")
    told: list[tuple[str, bytes | None]] = []
    watch = await kv.watch(lambda key, entry: told.append((key, entry.value if entry else None)), prefix="n.")
    await kv.put("n.a", b"1")
    assert told == [("n.a", b"1")]
    await kv.put("m.a", b"1")
    await kv.change("n.a", lambda entry: b"2")
    await kv.delete("n.a")
    await kv.delete("n.a")
    assert told[1:] == [("n.a", b"2"), ("n.a", None)]
    await elsewhere.put("n.b", b"")
    await until_async(lambda: ("n.b", b"") in told)
    assert len(told) == 4
    watch.stop()
    await kv.put("n.a", b"3")
    assert len(told) == 4


async def test_a_late_response_does_not_undo_changes_of_others(
    connect: Any, nats: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    bus = await connect(nats)
    kv, elsewhere = await KeyValue.open(bus, "late"), await KeyValue.open(await connect(nats), "late")
    told: list[bytes | None] = []
    watch = await kv.watch(lambda key, entry: told.append(entry.value if entry else None))
    publish = bus.publish_stored

    async def late(*what: Any, **how: Any) -> Any:
        stored = await publish(*what, **how)
        await until_async(lambda: told)
        await elsewhere.delete("a")
        await until_async(lambda: told == [b"1", None])
        return stored

    monkeypatch.setattr(bus, "publish_stored", late)
    await kv.put("a", b"1")
    assert told == [b"1", None]
    watch.stop()


async def test_older_values_of_a_record_do_not_follow_a_local_write(
    connect: Any, nats: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    bus = await connect(nats)
    kv, elsewhere = await KeyValue.open(bus, "slow"), await KeyValue.open(await connect(nats), "slow")
    told: list[bytes] = []
    held_back: list[Any] = []
    watch = await kv.watch(lambda key, entry: told.append(entry.value if entry else b"-"))
    deliver = watch._on_message
    assert watch._feed is not None
    monkeypatch.setattr(watch._feed, "_on_message", lambda *what: held_back.append(what))
    await elsewhere.put("a", b"1")
    await kv.put("a", b"2")
    await elsewhere.put("a", b"3")
    await until_async(lambda: len(held_back) == 3)
    assert told == [b"2"]
    for what in held_back:
        deliver(*what)
    assert told == [b"2", b"3"]
    assert watch._reported_revisions == {}
    watch.stop()


async def test_after_a_crash_a_watch_reports_everything_again_and_vanished_records(connect: Any, crash: Any) -> None:
    bus = await connect(crash.server)
    kv = await KeyValue.open(bus, "memory", memory=True)
    await kv.put("a", b"1")
    state: dict[str, bytes] = {}

    def on_change(key: str, entry: Entry | None) -> None:
        if entry is None:
            del state[key]
        else:
            state[key] = entry.value

    watch = await kv.watch(on_change)
    assert state == {"a": b"1"}
    await crash.restart(bus)
    await until_async(lambda: not state)
    await kv.put("b", b"2")
    await until_async(lambda: state == {"b": b"2"})
    watch.stop()


async def test_a_record_that_is_written_while_a_watch_is_opened_again_has_not_vanished(connect: Any, nats: Any) -> None:
    bus, other = await connect(nats), await connect(nats)
    kv, writer = await KeyValue.open(bus, "restless"), await KeyValue.open(other, "restless")
    keys = ("a", "b", "c")
    for key in keys:
        await kv.put(key, b"")
    told = dict.fromkeys(keys, 0)
    gone: list[str] = []

    def on_change(key: str, entry: Entry | None) -> None:
        told[key] += 1
        if entry is None:
            gone.append(key)

    def all_are_repeated() -> bool:
        return min(told.values()) > 1

    async def write(key: str) -> None:
        while True:
            await writer.put(key, b"")

    watch = await kv.watch(on_change)
    writing = [asyncio.create_task(write(key)) for key in keys]
    for _ in range(20):
        assert watch._feed is not None
        watch._feed._lost("the test")
        told |= dict.fromkeys(keys, 0)
        await until_async(all_are_repeated)
    for task in writing:
        task.cancel()
    watch.stop()
    assert gone == []


async def watched(kv: KeyValue) -> list[str]:
    """The keys that a watch reports in its snapshot, in order."""
    told: set[str] = set()
    watch = await kv.watch(lambda key, _: told.add(key))
    watch.stop()
    return sorted(told)


async def test_a_record_written_during_a_full_read_is_included(connect: Any, nats: Any) -> None:
    bus, other = await connect(nats), await connect(nats)
    kv, writer = await KeyValue.open(bus, "lively"), await KeyValue.open(other, "lively")
    keys = ["a", "b", "c"]
    for key in keys:
        await kv.put(key, b"")

    async def write(key: str) -> None:
        while True:
            await writer.put(key, b"")

    writing = [asyncio.create_task(write(key)) for key in keys]
    lists: list[list[str]] = []
    for _ in range(50):
        lists.append(sorted(await kv.keys()))
        lists.append(await watched(kv))
    for task in writing:
        task.cancel()
    assert lists == [keys] * len(lists)


async def test_a_watch_whose_feed_is_lost_while_it_begins_begins_again(connect: Any, nats: Any) -> None:
    kv = await KeyValue.open(await connect(nats), "unlucky")
    await kv.put("a", b"")
    told: list[str] = []
    watch: Watch

    def on_change(key: str, entry: Entry | None) -> None:
        told.append(key)
        if len(told) == 1:
            assert watch._feed is not None
            watch._feed._lost("the test")

    watch = Watch(kv, "", on_change)
    await watch.start()
    watch.stop()
    assert told == ["a", "a"]
