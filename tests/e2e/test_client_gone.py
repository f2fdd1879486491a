"""A client that disconnects cancels its call: a queued call does not start, and a running call ends."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpufn import Client
from gpufn.call import transport as _transport
from gpufn.client.http_transport import HttpTransport
from tests.conftest import Platform
from tests.e2e.apps.leaving import notes
from tests.waiting import until

pytestmark = pytest.mark.e2e

APP = Path(__file__).parent / "apps" / "leaving.py"
WITHIN_S = 20.0
ITEM = 100_000
MOST_AHEAD = 32 << 20  # bytes: the sockets' buffers on the way, and the items that credit allows ahead


@pytest.fixture(scope="module")
def leaving(platform: Platform) -> Iterator[Platform]:
    platform.gpufn("deploy", APP)
    yield platform
    for name in ("notes", "counts"):
        platform.client.delete(f"/v1/functions/{name}")


def connect(platform: Platform, function: str, arguments: dict[str, Any], *headers: str) -> socket.socket:
    """Return a connection that has sent its request and waits for the response."""
    host, port = platform.url.removeprefix("http://").split(":")
    body = json.dumps(arguments)
    lines = [
        f"POST /v1/functions/{function}/invoke HTTP/1.1", f"Host: {host}:{port}", "Content-Type: application/json",
        f"Content-Length: {len(body)}", *headers, "", body,
    ]  # fmt: skip
    connection = socket.create_connection((host, int(port)), timeout=WITHIN_S)
    connection.sendall("\r\n".join(lines).encode())
    return connection


def text(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def test_calls_that_run_and_that_wait_are_cancelled_when_their_clients_leave(leaving: Platform, tmp_path: Path) -> None:
    running, waiting = tmp_path / "running", tmp_path / "waiting"
    first = connect(leaving, "notes", {"path": str(running), "seconds": 60})
    until(lambda: text(running) == "began\n", lambda: text(running))
    second = connect(leaving, "notes", {"path": str(waiting)})
    why = "/v1/functions/notes/why"
    until(lambda: leaving.client.get(why).json()["queued"], lambda: leaving.client.get(why).text)

    second.close()
    until(lambda: leaving.client.get(why).json()["queued"] == 0, lambda: leaving.client.get(why).text)
    first.close()
    # The only slot is free again long before the minute of the cancelled call is over.
    assert leaving.invoke("notes", {"path": str(tmp_path / "next")}) == "done"
    assert (text(running), text(waiting)) == ("began\n", "")


def test_a_call_whose_task_is_cancelled_is_cancelled(leaving: Platform, tmp_path: Path) -> None:
    running = tmp_path / "running"
    transport = HttpTransport(lambda: Client(leaving.url))

    async def main() -> None:
        task = asyncio.create_task(notes.aio.remote(str(running), 60.0))
        await asyncio.to_thread(until, lambda: text(running) == "began\n", lambda: text(running))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    _transport.install(transport)
    try:
        asyncio.run(main())
    finally:
        _transport.install(None)
        transport.close()
    # The only slot is free again long before the minute of the cancelled call is over.
    assert leaving.invoke("notes", {"path": str(tmp_path / "next")}) == "done"
    assert text(running) == "began\n"


def test_a_stream_that_its_reader_closes_midway_ends_its_generator(leaving: Platform, tmp_path: Path) -> None:
    ended = tmp_path / "ended"
    with leaving.client.stream(
        "POST",
        "/v1/functions/counts/invoke",
        json={"path": str(ended)},
        headers={"accept": "text/event-stream"},
    ) as answer:
        lines = answer.iter_lines()
        assert [next(lines) for _ in range(8)] == [
            "event: item", "id: 0", 'data: "0"', "", "event: item", "id: 1", 'data: "1"', "",
        ]  # fmt: skip
    until(lambda: text(ended), lambda: leaving.client.get("/v1/functions/counts/why").text)
    assert text(ended).startswith("closed at ")


def test_a_reader_that_stops_reading_stops_only_its_generator(leaving: Platform, tmp_path: Path) -> None:
    """Items wait in the generator, not in the platform's memory."""
    ended = tmp_path / "ended"
    reader = connect(leaving, "counts", {"path": str(ended), "size": ITEM}, "Accept: text/event-stream")
    assert reader.recv(64).startswith(b"HTTP/1.1 200 OK")
    # Long enough for thousands of items.
    assert leaving.invoke("notes", {"path": str(tmp_path / "other"), "seconds": 1}) == "done"
    reader.close()
    until(lambda: text(ended), lambda: leaving.client.get("/v1/functions/counts/why").text)
    assert int(text(ended).removeprefix("closed at ")) * ITEM < MOST_AHEAD
