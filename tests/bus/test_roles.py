"""What a role may not do on the bus: read the keys and secrets of users, which are the gateway's."""

from __future__ import annotations

from typing import Any

import pytest

from gpufn.bus.embedded import EmbeddedServer
from gpufn.bus.kv import KeyValue
from gpufn.errors import BusUnavailable
from gpufn.protocol import subjects

SECRET = (subjects.API_KEYS, subjects.WEBHOOK_SECRETS)


@pytest.mark.parametrize("bucket", SECRET)
@pytest.mark.parametrize("role", ["agent", "runner", "builder"])
async def test_only_the_gateway_reads_keys_and_secrets(
    nats: EmbeddedServer, connect: Any, role: str, bucket: str
) -> None:
    gateway = await KeyValue.open(await connect(nats, "gateway"), bucket)
    await gateway.put("a", b"secret")
    assert await gateway.get("a") is not None
    other = await connect(nats, role)
    for verb, body in (
        (f"STREAM.MSG.GET.KV_{bucket}", b'{"last_by_subj":"$KV.%b.a"}' % bucket.encode()),
        (f"DIRECT.GET.KV_{bucket}", b'{"last_by_subj":"$KV.%b.a"}' % bucket.encode()),
        (f"DIRECT.GET.KV_{bucket}.$KV.{bucket}.a", b""),
    ):
        with pytest.raises(BusUnavailable):
            await other.request(f"$JS.API.{verb}", body, timeout_s=0.3)
