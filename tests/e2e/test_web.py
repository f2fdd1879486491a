"""Web functions on a whole platform: FastAPI, Flask and endpoints, WebSockets, and applications that misbehave."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import httpx
import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect

from tests.conftest import Platform
from tests.waiting import until

pytestmark = pytest.mark.e2e

APP = Path(__file__).parent / "apps" / "web.py"
SITE, OLD, AREA, BROKEN = (f"/web/default/default/{name}" for name in ("site", "old", "area", "broken"))


@pytest.fixture(scope="module")
def web(platform: Platform) -> Platform:
    platform.gpufn("deploy", APP, "--no-check")
    return platform


def dial(web: Platform, path: str, **options: Any) -> ClientConnection:
    client: ClientConnection = connect(
        f"ws{web.url.removeprefix('http')}{path}", compression=None, proxy=None, **options
    )
    return client


def close_of(client: ClientConnection, *messages: bytes) -> tuple[int, str]:
    """Send messages. Return the code and the reason with which the server closes the WebSocket."""
    with client, pytest.raises(ConnectionClosed) as closed:  # noqa: PT012
        for message in messages:
            client.send(message)
        client.recv(timeout=20)
    assert closed.value.rcvd is not None
    return closed.value.rcvd.code, closed.value.rcvd.reason


def read_until(client: socket.socket, end: bytes) -> None:
    received = b""
    while end not in received:
        part = client.recv(1 << 16)
        assert part, received
        received += part


def test_fastapi(web: Platform) -> None:
    assert web.ready_workers("site") == 0  # the request waits for the start
    home = web.client.get(f"{SITE}/", params={"q": "a b"}, headers={"authorization": "Bearer gpufn_x_y"})
    assert home.json() == {"started": "yes", "link": f"{SITE}/seen", "key": None, "query": "a b"}
    assert "cache-control" not in home.headers
    assert web.client.get(SITE, params={"q": "a"}).headers["location"] == f"{SITE}/?q=a"

    # A range, and the application's own caching.
    part = web.client.get(f"{SITE}/file", headers={"range": "bytes=256-511"})
    assert (part.status_code, part.content) == (206, bytes(range(256)))
    assert part.headers["content-range"] == "bytes 256-511/256000"
    whole = web.client.get(f"{SITE}/file")
    assert (len(whole.content), whole.headers["cache-control"]) == (256_000, "max-age=60")
    assert web.client.head(f"{SITE}/file").headers["content-length"] == "256000"

    # A large form, and a body of unknown length that is answered while it arrives.
    upload = web.client.post(f"{SITE}/upload", files={"file": ("big", bytes(3 << 20))})
    assert upload.json() == {"name": "big", "size": 3 << 20}
    shouted = web.client.patch(f"{SITE}/shout", content=iter([b"ab", b"c" * 200_000]))
    assert shouted.text == "AB" + "C" * 200_000

    # An invoke is a call without an HTTP request for the application.
    refused = web.post("site")
    assert (refused.status_code, refused.json()["code"]) == (422, "invalid_input")


def test_a_response_begins_before_the_request_ends(web: Platform) -> None:
    host, port = web.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=20) as client:
        client.sendall(f"PATCH {SITE}/shout HTTP/1.1\r\nhost: {host}\r\ntransfer-encoding: chunked\r\n\r\n".encode())
        client.sendall(b"2\r\nab\r\n")
        read_until(client, b"AB")
        client.sendall(b"1\r\nc\r\n0\r\n\r\n")
        read_until(client, b"C\r\n0\r\n\r\n")


def test_a_client_that_leaves_is_reported_to_the_application(web: Platform) -> None:
    web.client.get(f"{SITE}/seen")  # a worker is ready then
    with web.client.stream("GET", f"{SITE}/waits"):
        until(lambda: web.client.get(f"{SITE}/seen").json()[-1:] == ["waits"])
    until(lambda: web.client.get(f"{SITE}/seen").json()[-1] == "disconnected")


def test_websockets(web: Platform) -> None:
    with dial(web, f"{SITE}/echo", subprotocols=["chat", "other"]) as client:
        assert client.subprotocol == "chat"
        for message in ("ä", b"\0\xff", "", "x" * 1_000_000):
            client.send(message)
            assert client.recv(timeout=20) == message
        for number in range(2000):  # more than both windows of events
            client.send(str(number))
        assert [client.recv(timeout=20) for _ in range(2000)] == [str(number) for number in range(2000)]
        client.close(4001)
    until(lambda: web.client.get(f"{SITE}/seen").json()[-1] == "closed 4001")

    code, _ = close_of(dial(web, f"{SITE}/echo"), bytes((4 << 20) + 1))
    assert code == 1009
    code, reason = close_of(dial(web, f"{SITE}/raises"))
    assert code == 1011
    assert "secret" not in reason
    for path, status in ((f"{SITE}/nowhere", 403), (f"{AREA}/", 422), ("/web/-/-/nowhere/", 404), (f"{OLD}/", 403)):
        with pytest.raises(InvalidStatus) as refused:
            dial(web, path)
        assert refused.value.response.status_code == status, path


def test_an_unread_flood_is_stopped(web: Platform) -> None:
    host, port = web.url.removeprefix("http://").split(":")
    upgrade = "connection: upgrade\r\nupgrade: websocket\r\nsec-websocket-version: 13"
    key = "sec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA=="
    with socket.create_connection((host, int(port)), timeout=20) as client:
        client.sendall(f"GET {SITE}/sleeps HTTP/1.1\r\nhost: {host}\r\n{upgrade}\r\n{key}\r\n\r\n".encode())
        assert client.recv(1 << 16).startswith(b"HTTP/1.1 101 ")
        message = b"\x82\xff" + (1 << 16).to_bytes(8, "big") + bytes(4) + bytes(1 << 16)
        client.settimeout(0.5)
        with pytest.raises(TimeoutError):  # noqa: PT012
            for _ in range(2000):
                client.sendall(message)


def test_flask_and_an_endpoint(web: Platform) -> None:
    size = web.client.post(f"{OLD}/size", params={"q": "a"}, content=bytes(1 << 20))
    assert size.json() == {"size": 1 << 20, "root": OLD, "q": "a"}

    assert web.client.get(f"{AREA}/", params={"width": "2.5"}).json() == 2.5
    assert web.client.post(f"{AREA}/", params={"width": "2"}, json={"height": 3}).json() == 6.0
    assert web.client.post(f"{AREA}/", params={"width": "2"}, data={"height": "3"}).json() == 6.0
    assert web.invoke("area", {"width": 2, "height": 2}) == 4.0
    for method, path, status in (
        ("GET", f"{AREA}/?width=a", 422),
        ("GET", f"{AREA}/?width=1&depth=2", 422),
        ("GET", f"{AREA}/", 422),
        ("DELETE", f"{AREA}/?width=1", 405),
        ("GET", f"{AREA}/below?width=1", 404),
    ):
        assert web.client.request(method, path).status_code == status, path


@pytest.mark.parametrize(
    ("case", "status", "code"),
    [
        ("twice", 500, "function_raised"),
        ("nothing", 500, "function_raised"),
        ("body", 500, "function_raised"),
        ("split", 500, "function_raised"),
        ("never", 504, "invocation_timed_out"),
        ("ok", 200, ""),
    ],
)
def test_an_application_that_breaks_the_rules(web: Platform, case: str, status: int, code: str) -> None:
    response = web.client.get(f"{BROKEN}/{case}")
    assert response.status_code == status
    if code:
        assert response.json()["code"] == code
        assert "traceback" not in response.json()
        assert response.headers["cache-control"] == "no-store"


@pytest.mark.parametrize("case", ["short", "half", "dies"])
def test_a_response_that_is_cut(web: Platform, case: str, tmp_path: Path) -> None:
    gate = tmp_path / "gate"

    def read() -> None:
        with web.client.stream("GET", f"{BROKEN}/{case}?gate={gate}") as response:
            for _ in response.iter_raw():
                gate.touch()

    with pytest.raises(httpx.RemoteProtocolError):
        read()
    assert web.client.get(f"{BROKEN}/ok").text == "part"  # another worker starts for the next request


def test_a_websocket_whose_session_ends(web: Platform, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    client = dial(web, f"{BROKEN}/dies?gate={gate}")
    gate.touch()
    code, reason = close_of(client)
    assert (code, reason.partition(":")[0]) == (1011, "worker_lost")
    code, reason = close_of(dial(web, f"{BROKEN}/sleeps"))
    assert (code, reason.partition(":")[0]) == (1011, "invocation_timed_out")
    with pytest.raises(InvalidStatus) as refused:
        dial(web, f"{BROKEN}/never")
    assert refused.value.response.status_code == 504
