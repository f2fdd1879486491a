"""API keys for one test: tests share the bus, so each test deletes the keys that it creates."""

from __future__ import annotations

from gpufn_core.protocol.codec import encode
from gpufn_gateway.auth.access import new_key
from tests.gateway.whole import Whole
from tests.waiting import until_async


async def with_key(gateway: Whole, *scopes: str) -> str:
    """Create a key; return its secret."""
    key, secret = new_key("k", scopes, 0.0)
    await gateway.keys.create(key.id, encode(key))
    await until_async(lambda: gateway.access.knows(key.id))
    return secret


async def without_keys(gateway: Whole) -> None:
    for key in await gateway.keys.keys():
        await gateway.keys.delete(key)
    await until_async(lambda: not gateway.access.keys)
