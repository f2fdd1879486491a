"""Web applications in a worker: the ASGI interface, its rules, and the windows of a session."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from gpufn_core.errors import BusUnavailable, InvalidInput
from gpufn_core.protocol import frames
from gpufn_core.protocol.codec import pack
from gpufn_core.protocol.streams import web_session
from gpufn_core.protocol.streams.stream_window import STREAM_WINDOW
from gpufn_core.protocol.streams.web_session import (
    Accept,
    BodyPart,
    Close,
    Disconnect,
    MessagePart,
    ResponseStart,
    WebRequest,
    unpack_down,
)
from gpufn_core.spec.web_spec import WebKind
from gpufn_platform.shared_bodies.bodies import SharedBodies
from gpufn_runtime.worker.execute.attempts import Attempt
from gpufn_runtime.worker.web.application import Application, WebRequests
from gpufn_runtime.worker.web.session import Session

START = {"type": "http.response.start", "status": 200, "headers": [(b"a", b"b")]}
BODY = {"type": "http.response.body", "body": b"x"}


class Link:
    """Notes the frames of a session."""

    def __init__(self) -> None:
        self.down: list[tuple[Any, bytes]] = []
        self.taken: list[int] = []

    def send(self, frame: Any, body: bytes = b"", *, link: int) -> None:
        if isinstance(frame, frames.Item):
            self.down.append(unpack_down(body))
        else:
            self.taken.append(frame.taken)


class Served:
    """An application that serves one session, and the gateway's end of it."""

    def __init__(self, app: Any, *, is_socket: bool = False, has_more: bool = False, body: bytes = b"") -> None:
        request = WebRequest(
            is_socket, "GET", "http", "1.1", "/web/a/b/c/x", b"/x", "/web/a/b/c", b"", (), None, None, (), has_more
        )
        run = frames.Run(1, "i", "", web_session.CONTENT_TYPE, "", stream=True, credits=STREAM_WINDOW)
        link: Any = Link()
        self.link = link
        self.attempt = Attempt(run, b"", 1, SharedBodies(""), run.credits, 0.0)
        self._changed = asyncio.Event()
        self._sent = 0
        session = Session(self.attempt, request, body, link=self.link, changed=self._changed)
        self.task = asyncio.create_task(Application(app, WebKind.ASGI, threads=1).serve(session))

    async def send(self, *events: tuple[web_session.Up, bytes]) -> None:
        assert self.attempt.on_input is not None
        for event, data in events:
            self.attempt.on_input(self._sent, pack(event, data))
            self._sent += 1
        await settle()

    def grant(self, items: int) -> None:
        self.attempt.credits += items
        self._changed.set()


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def run(scenario: Callable[[], Any]) -> None:
    asyncio.run(asyncio.wait_for(scenario(), 10))


def sends(*events: dict[str, Any]) -> Any:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        for event in events:
            await send(event)

    return app


def test_a_short_response_is_one_event() -> None:
    async def scenario() -> None:
        served = Served(sends(START, BODY))
        await served.task
        assert served.link.down == [(ResponseStart(200, ((b"a", b"b"),), False), b"x")]

    run(scenario)


def test_a_body_is_split_and_its_head_does_not_wait_for_it() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send(START)
        await settle()
        await send({**BODY, "body": bytes(web_session.PART_BYTES + 1), "more_body": True})
        await send({**BODY, "body": b""})

    async def scenario() -> None:
        served = Served(app)
        await served.task
        assert [(event, len(data)) for event, data in served.link.down] == [
            (ResponseStart(200, ((b"a", b"b"),), True), 0),
            (BodyPart(True), web_session.PART_BYTES),
            (BodyPart(True), 1),
            (BodyPart(False), 0),
        ]

    run(scenario)


@pytest.mark.parametrize(
    "events", [(START, START), (BODY,), (START, BODY, BODY), (START, {"type": "websocket.send"}), (), (START,)]
)
def test_an_application_that_breaks_the_rules_fails(events: Any) -> None:
    async def scenario() -> None:
        served = Served(sends(*events))
        with pytest.raises(RuntimeError):
            await served.task
        await settle()
        assert len(served.link.down) == (events[:2] == (START, BODY))  # no head follows the end of the session

    run(scenario)


def test_the_body_arrives_and_then_the_disconnect() -> None:
    received: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        received.extend([await receive() for _ in range(4)])
        await send(START)
        await send({**BODY, "more_body": True})

    async def scenario() -> None:
        served = Served(app, has_more=True)
        await served.send((BodyPart(True), b"a"), (BodyPart(False), b"b"), (Disconnect(1006), b""))
        await served.task  # the client is gone, so that its incomplete response is no fault
        assert [each.get("body") for each in received] == [b"", b"a", b"b", None]

    run(scenario)


def test_an_application_waits_for_its_reader() -> None:
    async def scenario() -> None:
        count = STREAM_WINDOW + 10
        served = Served(sends(START, *[{**BODY, "more_body": True}] * count, BODY))
        await settle()
        assert len(served.link.down) == STREAM_WINDOW
        served.grant(20)
        await served.task
        assert len(served.link.down) == count + 1

    run(scenario)


def test_a_large_response_waits_for_its_reader() -> None:
    async def scenario() -> None:
        parts = web_session.DOWN_WINDOW_BYTES // web_session.PART_BYTES
        served = Served(sends(START, {**BODY, "body": bytes(2 * web_session.DOWN_WINDOW_BYTES)}))
        await settle()
        assert len(served.link.down) == parts
        served.grant(parts)
        await served.task
        assert len(served.link.down) == 2 * parts

    run(scenario)


def test_input_that_the_bus_lost_fails_the_session() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await receive()

    async def scenario() -> None:
        served = Served(app, has_more=True)
        served._sent = 1
        await served.send((BodyPart(False), b"a"))
        with pytest.raises(BusUnavailable):
            await served.task

    run(scenario)


def test_a_websocket() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        assert (await receive())["type"] == "websocket.connect"
        await send({"type": "websocket.accept", "subprotocol": "chat"})
        while (event := await receive())["type"] == "websocket.receive":
            await send({**event, "type": "websocket.send"})
        assert (event["code"], event["reason"]) == (4000, "bye")

    async def scenario() -> None:
        served = Served(app, is_socket=True)
        await served.send((MessagePart(True, True), b"a"), (MessagePart(True, False), b"b"))
        await served.send((MessagePart(False, False), b"\xff"), (Disconnect(4000, "bye"), b""))
        await served.task
        assert served.link.down == [
            (Accept("chat", ()), b""),
            (MessagePart(True, False), b"ab"),
            (MessagePart(False, False), b"\xff"),
        ]

    run(scenario)


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        ((), [Close(1000)]),
        (({"type": "websocket.close"},), [Close(1000)]),
        (({"type": "websocket.accept"}, {"type": "websocket.close", "code": 4001}), [Accept(None, ()), Close(4001)]),
        (
            (
                {"type": "websocket.http.response.start", "status": 418, "headers": []},
                {"type": "websocket.http.response.body", "body": b"no"},
            ),
            [ResponseStart(418, (), False)],
        ),
    ],
)
def test_the_end_of_a_websocket(events: Any, expected: Any) -> None:
    async def scenario() -> None:
        served = Served(sends(*events), is_socket=True)
        await served.task
        assert [event for event, _ in served.link.down] == expected

    run(scenario)


@pytest.mark.parametrize(
    "events",
    [
        ({"type": "websocket.send", "text": "a"},),
        ({"type": "websocket.accept"}, {"type": "websocket.accept"}),
        ({"type": "websocket.close"}, {"type": "websocket.close"}),
        ({"type": "websocket.accept"}, {"type": "websocket.send", "bytes": bytes((4 << 20) + 1)}),
    ],
)
def test_a_websocket_that_breaks_the_rules_fails(events: Any) -> None:
    async def scenario() -> None:
        with pytest.raises(RuntimeError):
            await Served(sends(*events), is_socket=True).task

    run(scenario)


def test_the_lifespan() -> None:
    log: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        for _ in range(2):
            phase = (await receive())["type"]
            log.append(phase)
            await send({"type": f"{phase}.complete"})

    async def fails(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "lifespan.startup.failed", "message": "no disk"})

    async def scenario() -> None:
        application = Application(app, WebKind.ASGI, threads=1)
        await application.start()
        await application.stop()
        assert log == ["lifespan.startup", "lifespan.shutdown"]
        without = Application(sends(), WebKind.ASGI, threads=1)  # has no lifespan
        await without.start()
        await without.stop()
        with pytest.raises(RuntimeError, match="no disk"):
            await Application(fails, WebKind.ASGI, threads=1).start()

    run(scenario)


def test_a_call_is_no_request() -> None:
    with pytest.raises(InvalidInput):
        WebRequests("site").bind("application/json", b"{}")


def test_the_return_value_of_the_function_must_be_an_application() -> None:
    with pytest.raises(TypeError):
        Application("a page", WebKind.ASGI, threads=1)
