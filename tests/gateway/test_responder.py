"""Answers to requests on the bus: each request gets one, whatever happens."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from gpufn_core.errors import Conflict, ProtocolMismatch
from gpufn_core.protocol.codec import encode
from gpufn_core.protocol.messages import VariantReply, VariantRequest
from gpufn_core.protocol.subjects import VARIANTS
from gpufn_gateway.functions.variant_requests import VariantRequests
from gpufn_gateway.responder import Responder
from gpufn_platform.bus.connection import Bus

_reply = msgspec.msgpack.Decoder(VariantReply)


@contextlib.asynccontextmanager
async def connected(nats: Any) -> AsyncIterator[Bus]:
    bus = await Bus.connect(nats.url, name="responder")
    try:
        yield bus
    finally:
        await bus.close()


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (Conflict("x"), "conflict"),
        (ProtocolMismatch("x"), "protocol_mismatch"),
        (msgspec.ValidationError("x"), "platform_error"),
        (KeyError("x"), "platform_error"),
    ],
)
async def test_an_error_is_the_reply(nats: Any, error: Exception, code: str) -> None:
    async def answer(request: bytes) -> bytes:
        raise error

    async with connected(nats) as bus:
        Responder(bus, "test.errors", answer, lambda info: info.code.encode()).start()
        assert (await bus.request("test.errors", b"")).payload == code.encode()


async def test_a_reply_that_exceeds_a_message_is_refused(nats: Any) -> None:
    async def answer(request: bytes) -> bytes:
        return bytes(bus.server_info["max_payload"] + 1)

    async with connected(nats) as bus:
        Responder(bus, "test.large", answer, lambda info: info.code.encode()).start()
        assert (await bus.request("test.large", b"")).payload == b"payload_too_large"


async def test_an_unexpected_error_of_a_variant_is_answered(nats: Any) -> None:
    variants: Any = object()  # has no method: any call raises AttributeError
    async with connected(nats) as bus:
        VariantRequests(bus, variants).start()
        reply = _reply.decode((await bus.request(VARIANTS, encode(VariantRequest("f", "a", "g")))).payload)
        assert reply.error is not None
        assert reply.error.code == "platform_error"
