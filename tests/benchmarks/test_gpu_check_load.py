"""A caller counts successful calls and reports failures."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator

import pytest

from gpu_check.load import Caller, all_at_once


class _Handler(http.server.BaseHTTPRequestHandler):
    """A gateway that answers calls of `good`, refuses calls of `bad`, and breaks the connection of calls of `ugly`."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        assert body == {"times": 3}
        if "/ugly/" in self.path:
            self.close_connection = True
            return
        answer = b"1.0" if "/good/" in self.path else b"no room"
        self.send_response(200 if "/good/" in self.path else 503)
        self.send_header("content-length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        pass


@pytest.fixture
def url() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_each_caller_sees_its_own_function(url: str) -> None:
    callers = [Caller(url, name, {"times": 3}) for name in ("good", "bad", "ugly")]
    good, bad, ugly = all_at_once(callers, 0.2)
    assert good.calls_s
    assert not good.failures
    assert (list(bad.calls_s), set(bad.failures)) == ([], {"no room"})
    assert not ugly.calls_s
    assert all("RemoteDisconnected" in why for why in ugly.failures)


def test_a_caller_can_be_stopped(url: str) -> None:
    stop = threading.Event()
    stop.set()
    assert not Caller(url, "good", {"times": 3}).for_seconds(600, stop).calls_s
