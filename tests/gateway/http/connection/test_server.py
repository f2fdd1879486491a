"""The gateway's HTTP server."""

from __future__ import annotations

import asyncio
from typing import Any

from gpufn_core.encoding import media
from gpufn_gateway.http.responses import GPUFN_FORMAT, send_result
from tests.gateway.listening import gateway_serving


async def test_a_browser_may_not_guess_the_type_of_a_result_nor_store_it_nor_load_it_into_another_page() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send_result(send, GPUFN_FORMAT, media.JSON, b'"<script>"', [])

    async with gateway_serving(app) as (_, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        head = await reader.readuntil(b"\r\n\r\n")
        for line in (
            b"x-content-type-options: nosniff",
            b"cache-control: no-store",
            b"cross-origin-resource-policy: same-origin",
        ):
            assert head.count(b"\r\n%b\r\n" % line) == 1
        writer.close()
