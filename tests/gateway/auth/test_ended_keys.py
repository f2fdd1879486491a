"""Calls whose key or token ends while they run: which of them continue, and which of them end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from gpufn_core.domain.invocation import OutcomeKind
from gpufn_core.errors import Unauthorized
from gpufn_core.protocol.messages import ItemReply, ResultReply
from gpufn_gateway.auth.access import new_key
from gpufn_gateway.auth.tokens import SigningKey, Token, sign
from tests.gateway.http.test_sse import EVENTS, URL, streaming

__all__ = ["streaming"]

GOOD = b'{"texts": ["a"]}'


def delete(gateway: Any, key: str) -> None:
    gateway.access.remove(key)


def expire(gateway: Any, key: str) -> None:
    gateway.clock.now += 100


@pytest.fixture(params=[delete, expire], ids=["deleted", "expired"])
def end(request: pytest.FixtureRequest) -> Callable[[Any, str], None]:
    ended: Callable[[Any, str], None] = request.param
    return ended


def key_of(gateway: Any) -> tuple[str, str]:
    """Return the id and the secret of a key that expires soon. Another key exists, so that keys are required."""
    gateway.access.put(new_key("first", ("admin",), 0.0)[0])
    key, secret = new_key("k", ("invoke:*", "read"), gateway.clock.time(), expires_in_s=50)
    gateway.access.put(key)
    return key.id, secret


async def test_an_accepted_call_returns_its_result_after_its_key_ended(
    gateway: Any, connection: Any, settle: Any, end: Callable[[Any, str], None]
) -> None:
    """A limit that docs/trust.md names: an accepted call keeps the rights that its connection had at the start."""
    id_, secret = key_of(gateway)
    gateway.queue.answer = lambda call: None
    client = connection("/v1/functions/embed/invoke", GOOD, authorization=f"Bearer {secret}")
    task = client.start(gateway.app)
    await settle()
    end(gateway, id_)
    gateway.queue.calls[0].reply(b"42")
    await task
    assert (client.sent[0]["status"], client.body) == (200, b"42")
    refused = await gateway.post("/v1/functions/embed/invoke", GOOD, authorization=f"Bearer {secret}")
    assert refused.status_code == 401


async def test_an_accepted_stream_continues_after_its_key_ended(
    streaming: Any, connection: Any, settle: Any, end: Callable[[Any, str], None]
) -> None:
    id_, secret = key_of(streaming)
    client = connection(URL, accept=EVENTS, authorization=f"Bearer {secret}")
    task = client.start(streaming.app)
    await settle()
    end(streaming, id_)
    (stream,) = streaming.streams
    stream.take(ItemReply(stream.id, 0, "application/json", "credits"), b"1")
    stream.take(ResultReply(stream.id, OutcomeKind.SUCCEEDED, None, "", 1, 1, 0.0, 0.0, items=1), b"")
    await task
    assert b"data: 1" in client.body


async def test_each_further_request_of_a_map_needs_the_key(gateway: Any, end: Callable[[Any, str], None]) -> None:
    """A map is a request per chunk, per read of its outcomes, and for its end."""
    id_, secret = key_of(gateway)
    map_ = "0" * 26
    requests = (
        ("PUT", f"/v1/functions/embed/maps/{map_}/items/0"),
        ("GET", f"/v1/maps/{map_}"),
        ("GET", f"/v1/maps/{map_}/outcomes"),
        ("DELETE", f"/v1/maps/{map_}"),
        ("GET", f"/v1/invocations/{map_}/result"),
    )
    end(gateway, id_)
    async with gateway.client(authorization=f"Bearer {secret}") as client:
        statuses = [(await client.request(*request)).status_code for request in requests]
    assert statuses == [401] * len(requests)


async def test_a_stream_about_others_calls_is_checked_at_each_line(
    gateway: Any, end: Callable[[Any, str], None]
) -> None:
    """Logs, events and outcomes, and each message of a WebSocket or a terminal, call this check."""
    id_, secret = key_of(gateway)
    headers = {b"authorization": f"Bearer {secret}".encode(), b"host": b"localhost"}
    principal = gateway.access.authenticate(headers)
    gateway.access.check_unchanged(headers, principal)
    end(gateway, id_)
    with pytest.raises(Unauthorized):
        gateway.access.check_unchanged(headers, principal)


async def test_a_token_ends_a_stream_as_its_key_does(gateway: Any, end: Callable[[Any, str], None]) -> None:
    id_, secret = key_of(gateway)
    gateway.access.tokens.signing_keys[1] = SigningKey(1, b"s" * 32, 0.0)
    token: Token = gateway.access.token_for(secret.encode(), 40.0)
    text = sign(gateway.access.tokens.signing_keys[1], token)
    headers = {b"authorization": f"Bearer {text}".encode(), b"host": b"localhost"}
    principal = gateway.access.authenticate(headers)
    end(gateway, id_)
    with pytest.raises(Unauthorized):
        gateway.access.check_unchanged(headers, principal)
