"""A receiver of webhooks that keeps every delivery, by the id of its call."""

from __future__ import annotations

import http.server
import json
import threading
from collections import defaultdict
from typing import Any, Self


class Receiver(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self._thread = threading.Thread(target=self.serve_forever, name="receiver")
        self.deliveries: dict[str, list[dict[str, Any]]] = defaultdict(list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self._thread.join()
        self.server_close()


class _Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        receiver: Any = self.server
        body = self.rfile.read(int(self.headers["content-length"]))
        receiver.deliveries[self.headers["webhook-id"]].append(json.loads(body)["data"])
        self.send_response(204)
        self.end_headers()

    def log_message(self, *_: object) -> None: ...
