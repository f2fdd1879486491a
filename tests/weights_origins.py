"""A Hugging Face Hub and an S3 store for tests, on one local HTTP server."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

COMMIT = "c" * 40
REPOSITORY = "org/model"
BUCKET = "bucket"
LFS_BYTES = 20  # the hub of these tests keeps larger files in its large file storage


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


class Origins:
    """`files` are the content of the repository and of the bucket. `requests` are methods, paths and headers.

    A request with a wrong token is refused. `cut` ends each response after that many bytes; `status` replaces the
    status of file downloads; `hold` delays the bodies of large files until it is set.
    """

    def __init__(self, files: dict[str, bytes]) -> None:
        self.files = files
        self.served = dict(files)  # contents of downloads; equal to the listed files by default
        self.token = ""
        self.keys = ""
        self.with_sha256 = False
        self.cut: int | None = None
        self.cuts = 1 << 30  # how many responses are cut
        self.status = 200
        self.hold: threading.Event | None = None
        self.requests: list[tuple[str, str, dict[str, str]]] = []
        self.redirects_to = ""
        self.next_page = ""  # the address of the second page of a list
        self.url = ""

    def environ(self) -> dict[str, str]:
        return {"HF_ENDPOINT": self.url, "AWS_ENDPOINT_URL": f"{self.url}/s3"}

    def downloads(self, name: str = "") -> list[dict[str, str]]:
        """The headers of the downloads of a file, or of all files."""
        return [
            headers
            for method, path, headers in self.requests
            if method == "GET" and _is_download(path) and path.endswith(name)
        ]


def _is_download(path: str) -> bool:
    return path.startswith((f"/{REPOSITORY}/resolve/", f"/s3/{BUCKET}/", "/cdn/")) and "?" not in path


@contextlib.contextmanager
def running_origins(files: dict[str, bytes]) -> Iterator[Origins]:
    origins = Origins(files)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: Any) -> None:
            pass

        def do_GET(self) -> None:
            self._respond()

        def do_HEAD(self) -> None:
            self._respond()

        def _respond(self) -> None:
            headers = {name.lower(): text for name, text in self.headers.items()}
            origins.requests.append((self.command, self.path, headers))
            parts = urlsplit(self.path)
            path = unquote(parts.path)
            prefixes = (f"/{REPOSITORY}/resolve/{COMMIT}/", f"/s3/{BUCKET}/", "/cdn/")
            names = [path.removeprefix(prefix) for prefix in prefixes if path.startswith(prefix)]
            if (refusal := self._refusal(path, headers.get("authorization", ""))) is not None:
                self._send(refusal, b"refused")
            elif path == f"/api/models/{REPOSITORY}/revision/main":
                self._send(200, json.dumps({"sha": COMMIT}).encode())
            elif path == f"/api/models/{REPOSITORY}/tree/{COMMIT}":
                self._tree("page" in parse_qs(parts.query))
            elif path.startswith("/s3/") and origins.redirects_to:
                self._send(302, b"", {"location": f"{origins.redirects_to}{self.path}"})
            elif path == f"/s3/{BUCKET}/" and parts.query:
                self._objects(parse_qs(parts.query))
            elif path.startswith(prefixes[0]) and origins.redirects_to:
                self._send(302, b"", {"location": f"{origins.redirects_to}/cdn/{names[0]}"})
            elif names and names[0] in origins.served:
                self._file(names[0])
            else:
                self._send(404, b"absent")

        def _refusal(self, path: str, authorization: str) -> int | None:
            if path.startswith("/s3/"):
                return 403 if origins.keys and f"Credential={origins.keys}/" not in authorization else None
            needs_token = origins.token and not path.startswith("/cdn/")
            return 401 if needs_token and authorization != f"Bearer {origins.token}" else None

        def _tree(self, is_second_page: bool) -> None:
            entries: list[dict[str, Any]] = [{"type": "directory", "path": "folder", "oid": "x", "size": 0}]
            for name, data in sorted(origins.files.items()):
                large = {"lfs": {"oid": sha256(data), "size": len(data)}} if len(data) > LFS_BYTES else {}
                entries.append({"type": "file", "path": name, "size": len(data), "oid": "sha1", **large})
            half = len(entries) // 2
            page = entries[half:] if is_second_page else entries[:half]
            address = origins.next_page or origins.url
            next_page = {} if is_second_page else {"link": f'<{address}{self.path}&page=2>; rel="next"'}
            self._send(200, json.dumps(page).encode(), next_page)

        def _objects(self, query: dict[str, list[str]]) -> None:
            prefix = query.get("prefix", [""])[0]
            names = sorted(name for name in origins.files if name.startswith(prefix))
            half = 0 if "continuation-token" in query else len(names) // 2
            page = names[len(names) // 2 :] if not half else names[:half]
            entries = "".join(
                f"<Contents><Key>{escape(name)}</Key><Size>{len(origins.files[name])}</Size><ETag>{_etag(name)}</ETag>"
                + ("<ChecksumAlgorithm>SHA256</ChecksumAlgorithm>" if origins.with_sha256 else "")
                + "</Contents>"
                for name in page
            )
            more = "<NextContinuationToken>t</NextContinuationToken>" if half else ""
            self._send(200, f'<L xmlns="http://s3.amazonaws.com/doc/2006-03-01/">{entries}{more}</L>'.encode())

        def _file(self, name: str) -> None:
            if origins.status != 200:
                self._send(origins.status, b"refused")
                return
            data = origins.served[name]
            if self.headers.get("if-match") not in (None, _etag(name)):
                self._send(412, b"changed")
                return
            status, headers = 200, {"etag": _etag(name)}
            if self.command == "HEAD" and origins.with_sha256:
                headers["x-amz-checksum-sha256"] = base64.b64encode(hashlib.sha256(data).digest()).decode()
            if wanted := self.headers.get("range"):
                start = int(wanted.removeprefix("bytes=").partition("-")[0])
                status, headers["content-range"] = 206, f"bytes {start}-{len(data) - 1}/{len(data)}"
                data = data[start:]
            self._send(status, data, headers, is_file=True)

        def _send(self, status: int, body: bytes, headers: Mapping[str, str] = {}, *, is_file: bool = False) -> None:
            self.send_response(status)
            for header, text in headers.items():
                self.send_header(header, text)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            if self.command == "HEAD":
                return
            if is_file and origins.hold is not None and len(body) > LFS_BYTES:
                first = 0 if self.headers.get("range") else 1
                self.wfile.write(body[:first])
                self.wfile.flush()
                origins.hold.wait(30)
                self.wfile.write(body[first:])
                return
            if is_file and origins.cut is not None and origins.cuts > 0 and len(body) > origins.cut:
                origins.cuts -= 1
                self.wfile.write(body[: origins.cut])
                self.close_connection = True
                return
            self.wfile.write(body)

    def _etag(name: str) -> str:
        return f'"{hashlib.md5(origins.served[name], usedforsecurity=False).hexdigest()}"'

    class Server(ThreadingHTTPServer):
        def handle_error(self, *_: Any) -> None:
            """Ignore clients that hang up."""

    server = Server(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    origins.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield origins
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
