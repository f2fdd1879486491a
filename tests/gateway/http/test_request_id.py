"""The id of a request, over real connections."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import httpx
import pytest

from gpufn_core.domain.invocation import InvocationState
from gpufn_core.errors import Forbidden
from gpufn_gateway import problems
from gpufn_gateway.http import request_id
from tests.gateway.listening import gateway_serving

URL = "/v1/functions/embed/invoke"


async def test_a_response_has_the_id_that_its_request_chose(gateway: Any) -> None:
    async with gateway_serving(gateway.app) as (_, port), httpx.AsyncClient() as client:
        here = f"http://127.0.0.1:{port}{URL}"
        for content, status in ((b'{"texts":["a"]}', 200), (b"{", 422)):
            answer = await client.post(here, content=content, headers={"x-request-id": "proxy/1:a=b"})
            assert (answer.status_code, answer.headers.get_list("x-request-id")) == (status, ["proxy/1:a=b"])
        assert answer.json()["request_id"] == "proxy/1:a=b"


@pytest.mark.parametrize("chosen", [None, "", "a b", "a" * 129, "caf\xe9", '"a"', "a,b"])
async def test_otherwise_it_has_a_new_one(gateway: Any, chosen: str | None) -> None:
    headers = [] if chosen is None else [(b"x-request-id", chosen.encode("latin-1"))]
    async with gateway_serving(gateway.app) as (_, port), httpx.AsyncClient() as client:
        here = f"http://127.0.0.1:{port}{URL}"
        answers = [await client.post(here, content=b"{", headers=headers) for _ in range(2)]
        ids = [answer.headers["x-request-id"] for answer in answers]
        assert ids == [answer.json()["request_id"] for answer in answers]
        assert len({*ids, chosen}) == 3


async def test_pipelined_requests_keep_their_own_ids(gateway: Any) -> None:
    async with gateway_serving(gateway.app) as (_, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        names = [f"r{number}" for number in range(3)]
        for name in names:
            writer.write(f"POST {URL} HTTP/1.1\r\nhost: localhost\r\nx-request-id: {name}\r\n\r\n".encode())
        for name in names:
            head = await reader.readuntil(b"\r\n\r\n")
            assert f"\r\nx-request-id: {name}\r\n".encode() in head
            assert f'"request_id":"{name}"'.encode() in await reader.readuntil(b"}")
        writer.close()


async def test_a_log_line_of_a_request_names_it(gateway: Any, caplog: pytest.LogCaptureFixture) -> None:
    def fail(call: Any) -> None:
        raise ValueError("a secret")

    gateway.queue.answer = fail
    caplog.handler.addFilter(request_id.add_to_record)
    async with gateway_serving(gateway.app) as (_, port), httpx.AsyncClient() as client:
        answer = await client.post(
            f"http://127.0.0.1:{port}{URL}", content=b'{"texts":[]}', headers={"x-request-id": "r-1"}
        )
    assert answer.status_code == 500
    (record,) = (each for each in caplog.records if each.levelno == logging.ERROR)
    assert (record.__dict__["request"], logging.makeLogRecord({}).__dict__.get("request")) == (" (request r-1)", None)


def test_the_outcome_of_a_call_is_the_same_for_every_request() -> None:
    """Regression: two requests for one result differed in the id of the request."""
    token = request_id.current.set("r-1")
    try:
        refusal, outcome = problems.problem_of(Forbidden("no")), problems.from_state(InvocationState.CANCELLED, None)
        assert json.loads(refusal.body())["request_id"] == "r-1"
        assert "request_id" not in json.loads(outcome.body())
    finally:
        request_id.current.reset(token)
