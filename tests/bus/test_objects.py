from __future__ import annotations

import asyncio
import os
from typing import Any

import pytest

from gpufn.bus import objects, streams
from gpufn.errors import ArtifactUnavailable


@pytest.mark.parametrize("size", [0, 1, 1 << 20, (20 << 20) + 1])
async def test_a_blob_comes_back_as_it_was(connect: Any, nats: Any, size: int) -> None:
    bus = await connect(nats)
    await objects.ensure_bucket(bus, "blobs")
    data = os.urandom(size)
    digest = await objects.put(bus, "blobs", data)
    assert digest == objects.digest_of(data)
    assert await objects.get(bus, "blobs", digest) == data
    await objects.delete(bus, "blobs", digest)
    await objects.delete(bus, "blobs", digest)
    assert not await objects.exists(bus, "blobs", digest)


async def test_the_same_bytes_are_stored_once_also_by_two_at_a_time(connect: Any, nats: Any) -> None:
    bus, other = await connect(nats), await connect(nats)
    await objects.ensure_bucket(bus, "once")
    data = os.urandom(3 << 20)
    digests = await asyncio.gather(objects.put(bus, "once", data), objects.put(other, "once", data))
    assert set(digests) == {await objects.put(bus, "once", data)}
    info = await bus.js("STREAM.INFO.OBJ_once")
    assert info["state"]["messages"] == 4
    assert await objects.get(other, "once", digests[0]) == data


async def test_an_absent_blob_says_so(connect: Any, nats: Any) -> None:
    bus = await connect(nats)
    await objects.ensure_bucket(bus, "blobs")
    with pytest.raises(ArtifactUnavailable, match="blobs has no abc"):
        await objects.get(bus, "blobs", "abc")


async def test_a_damaged_blob_is_never_handed_out(connect: Any, nats: Any) -> None:
    bus = await connect(nats)
    await objects.ensure_bucket(bus, "damaged")
    digest = await objects.put(bus, "damaged", bytes(2 << 20))
    chunk = await streams.next_message(bus, "OBJ_damaged", "$O.damaged.C.>", 2)
    assert chunk is not None
    await streams.delete_message(bus, "OBJ_damaged", chunk.seq)
    await bus.publish_stored(chunk.subject, b"\1" + chunk.payload[1:])
    with pytest.raises(ArtifactUnavailable, match="damaged: put it again"):
        await objects.get(bus, "damaged", digest)
