"""A collector of traces and logs: OTLP over HTTP, as protobuf."""

from __future__ import annotations

import http.server
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

ERROR = 2  # STATUS_CODE_ERROR
SERVER, PRODUCER, CONSUMER, INTERNAL = 2, 4, 5, 1


class Collector(http.server.ThreadingHTTPServer):
    """Keeps the spans and log records that it is sent. `status` and `hangs` make it a bad one."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.spans: list[Any] = []
        self.logs: list[Any] = []
        self.services: set[str] = set()
        self.status, self.body = 200, b""
        self.hangs: threading.Event | None = None
        self.requests = 0

    def handle_error(self, *_: object) -> None: ...  # the client may have disconnected

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1/traces"

    @property
    def logs_url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1/logs"

    def of(self, trace: str) -> dict[str, Any]:
        """The spans of a trace by their hexadecimal id."""
        return {span.span_id.hex(): span for span in list(self.spans) if span.trace_id.hex() == trace}

    def wait_for(self, trace: str, count: int) -> dict[str, Any]:
        give_up = time.monotonic() + 30
        while len(found := self.of(trace)) < count:
            assert time.monotonic() < give_up, sorted(span.name for span in found.values())
            time.sleep(0.02)
        return found

    def wait_for_lines(self, trace: str, count: int) -> list[Any]:
        """Wait for log records of a trace."""
        give_up = time.monotonic() + 30
        while len(found := [line for line in list(self.logs) if line.trace_id.hex() == trace]) < count:
            assert time.monotonic() < give_up, [line.body.string_value for line in found]
            time.sleep(0.02)
        return found


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        server: Any = self.server
        body = self.rfile.read(int(self.headers["content-length"]))
        server.requests += 1
        if server.hangs is not None:
            server.hangs.wait(30)
        if server.status == 200:
            self._keep(server, body)
        self.send_response(server.status)
        self.send_header("content-length", str(len(server.body)))
        self.end_headers()
        self.wfile.write(server.body)

    def _keep(self, server: Any, body: bytes) -> None:
        resources: Any
        if self.path == "/v1/logs":
            resources = ExportLogsServiceRequest.FromString(body).resource_logs
            server.logs += [line for each in resources for scope in each.scope_logs for line in scope.log_records]
        else:
            resources = ExportTraceServiceRequest.FromString(body).resource_spans
            server.spans += [span for each in resources for scope in each.scope_spans for span in scope.spans]
        for each in resources:
            named = {attribute.key: attribute.value.string_value for attribute in each.resource.attributes}
            server.services.add(named["service.name"])

    def log_message(self, *_: object) -> None: ...


@contextmanager
def collector() -> Iterator[Collector]:
    server = Collector()
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def attributes(span_or_line: Any) -> dict[str, Any]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in span_or_line.attributes}
