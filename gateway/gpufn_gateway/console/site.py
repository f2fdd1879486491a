"""The files of the console, which `scripts/console` builds from `gateway/console`. They are kept in memory, compressed.

The names of all files but the document have a hash of their content, so browsers may keep them forever.
"""

from __future__ import annotations

import gzip
import html
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from gpufn_gateway.problems import Headers, RouteError

FOLDER: Final = Path(__file__).with_name("assets")
STATIC: Final = "/console/static/"
_DOCUMENT: Final = "index.html"
_PAGE_TOKEN: Final = b"{{page-token}}"
_TYPES: Final = {
    ".css": b"text/css; charset=utf-8",
    ".html": b"text/html; charset=utf-8",
    ".js": b"text/javascript; charset=utf-8",
    ".svg": b"image/svg+xml",
    ".woff2": b"font/woff2",
}
_COMPRESSED: Final = frozenset({".css", ".html", ".js", ".svg"})
_STATIC_HEADERS: Final[Headers] = [
    (b"cache-control", b"public, max-age=31536000, immutable"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"vary", b"accept-encoding"),
    (b"x-content-type-options", b"nosniff"),
]
_POLICY: Final = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "font-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
# The opener policy separates the console from pages of web functions, which have the same origin: they cannot get hold
# of a window of the console.
DOCUMENT_HEADERS: Final[Headers] = [
    (b"content-type", _TYPES[".html"]),
    (b"content-security-policy", _POLICY.encode()),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"permissions-policy", b"camera=(), geolocation=(), microphone=(), payment=(), usb=()"),
    (b"referrer-policy", b"no-referrer"),
    (b"vary", b"cookie"),
]
_NOT_BUILT: Final = """<!doctype html><html lang="en"><meta charset="utf-8"><title>gpufn console</title>
<h1>The console is not built</h1>
<p>This gateway runs from a source tree without the console's files. Build them with Node.js 20 or newer:</p>
<pre>scripts/console</pre>
<p>Then load this page again. The wheel and the images contain the console. The API and the command line work without
it.</p></html>
"""
_AGAIN: Final = b"""<!doctype html><html lang="en"><meta charset="utf-8"><meta http-equiv="refresh" content="0">
<title>gpufn console</title></html>
"""


@dataclass(frozen=True)
class File:
    content_type: bytes
    plain: bytes
    compressed: bytes | None

    def negotiated(self, headers: Mapping[bytes, bytes]) -> tuple[Headers, bytes]:
        """Return the headers and the body for a client with these request headers."""
        own: Headers = [(b"content-type", self.content_type), *_STATIC_HEADERS]
        if self.compressed is not None and b"gzip" in headers.get(b"accept-encoding", b""):
            return [*own, (b"content-encoding", b"gzip")], self.compressed
        return own, self.plain


class Site:
    """The files in `folder`. They are read again when the document has changed, which the build writes last."""

    def __init__(self, folder: Path = FOLDER) -> None:
        self._folder = folder
        self._built_at = 0
        self._document = b""
        self._static: dict[str, File] = {}

    def check_built(self) -> None:
        """Raises RouteError unless the console is built."""
        self._refresh()
        if not self._document:
            raise RouteError(
                404,
                "This gateway runs from a source tree whose console is not built: run scripts/console there, which "
                "needs Node.js 20 or newer. The wheel and the images contain the console.",
            )

    def document(self, page_token: str) -> bytes:
        """Return the document with a page token in it; a page with instructions if the console is not built."""
        self._refresh()
        if not self._document:
            return _NOT_BUILT.encode()
        return self._document.replace(_PAGE_TOKEN, html.escape(page_token).encode())

    def reloading(self) -> bytes:
        """Return a document that loads the same page again, from this origin."""
        return _AGAIN

    def static(self, path: str, headers: Mapping[bytes, bytes]) -> tuple[Headers, bytes]:
        """Return the headers and the body of a file. Raises RouteError."""
        self._refresh()
        file = self._static.get(path.removeprefix(STATIC))
        if file is None:
            raise RouteError(404, "The console has no file of this name: load its page again.")
        return file.negotiated(headers)

    def _refresh(self) -> None:
        try:
            built_at = (self._folder / _DOCUMENT).stat().st_mtime_ns
        except FileNotFoundError:
            self._built_at, self._document, self._static = 0, b"", {}
            return
        if built_at != self._built_at:
            self._document = (self._folder / _DOCUMENT).read_bytes()
            folder = self._folder / "static"
            self._static = {each.name: _read(each) for each in folder.iterdir() if each.suffix in _TYPES}
            self._built_at = built_at


def _read(path: Path) -> File:
    plain = path.read_bytes()
    compressed = gzip.compress(plain, mtime=0) if path.suffix in _COMPRESSED else None
    return File(_TYPES[path.suffix], plain, compressed)
