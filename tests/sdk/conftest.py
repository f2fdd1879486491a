"""A gateway of canned answers, and projects of a few files."""

from __future__ import annotations

import contextlib
import http.server
import json
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from gpufn.deploy.imports.missing_packages import remove_stand_ins


@dataclass
class Request:
    method: str
    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class StubGateway:
    """A gateway that returns the responses of `answers` for "METHOD /path" in turn, and repeats the last one."""

    url: str = ""
    requests: list[Request] = field(default_factory=list)
    answers: dict[str, list[tuple[int, dict[str, str], bytes]]] = field(default_factory=dict)
    any_bundle: bool = False  # it has every bundle already

    def on(self, what: str, body: Any = b"", status: int = 200, **headers: str) -> None:
        if not isinstance(body, bytes):
            body, headers = json.dumps(body).encode(), {"content_type": "application/json", **headers}
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        self.answers.setdefault(what, []).append((status, names, body))

    def answer_to(self, request: Request) -> tuple[int, dict[str, str], bytes]:
        if self.any_bundle and "/bundles/" in request.path:
            return 200, {}, b""
        found = self.answers.get(f"{request.method} {request.path.partition('?')[0]}")
        if not found:
            return 404, {"content-type": "application/problem+json"}, b'{"code": "function_not_found", "detail": "no"}'
        return found.pop(0) if len(found) > 1 else found[0]


STUBS: dict[str, StubGateway] = {}  # by URL


@pytest.fixture
def gateway(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[StubGateway]:
    stub = StubGateway()

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _serve(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            headers = {name.lower(): value for name, value in self.headers.items()}
            request = Request(self.command, self.path, headers, body)
            stub.requests.append(request)
            status, answer_headers, answer = stub.answer_to(request)
            if status == 0:  # the connection breaks
                self.close_connection = True
                return
            self.send_response(status)
            for name, value in answer_headers.items():
                self.send_header(name, value)
            self.send_header("content-length", str(len(answer)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(answer)

        do_GET = do_POST = do_PUT = do_DELETE = do_HEAD = _serve  # noqa: N815

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        stub.url = f"http://127.0.0.1:{server.server_port}"
        STUBS[stub.url] = stub
        monkeypatch.setenv("GPUFN_URL", stub.url)
        monkeypatch.setenv("GPUFN_HOME", str(tmp_path / "home"))
        monkeypatch.delenv("GPUFN_API_KEY", raising=False)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        yield stub
        del STUBS[stub.url]
        server.shutdown()
        thread.join()


Project = Callable[[dict[str, str]], Path]


@pytest.fixture(autouse=True)
def _no_module_stays(tmp_path: Path) -> Iterator[None]:
    """Forget every module that a test imported from its folder: the next test may have another of that name."""
    before, path = set(sys.modules), list(sys.path)
    yield
    remove_stand_ins()
    sys.path[:] = path
    for name in set(sys.modules) - before:
        with contextlib.suppress(AttributeError, TypeError):
            if str(sys.modules[name].__file__).startswith(str(tmp_path)):
                del sys.modules[name]


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    """Write files, by path and text, and return their folder."""
    root = tmp_path / "project"
    root.mkdir()
    monkeypatch.chdir(root)

    def write(files: dict[str, str]) -> Path:
        for name, text in files.items():
            file = root / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        return root

    return write
