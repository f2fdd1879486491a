"""The rules of RFC 9112 for a request head that the parser does not enforce. Pure.

llhttp itself rejects folded lines, Transfer-Encoding beside Content-Length, a second Content-Length, a Content-Length
that is not a number, and line ends other than CRLF.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from gpufn_gateway.http import host_field

# Fields that may occur only once: a proxy in front may have checked the first line, and we would read the last.
_SINGLE: Final = (b"host", b"authorization", b"origin", b"content-type", b"transfer-encoding")


def find_violation(
    version: str, target: bytes, lines: Sequence[tuple[bytes, bytes]], fields: Mapping[bytes, bytes]
) -> str | None:
    """Return the reason to reject a request with 400, or None. `fields` is `lines` as a dict, names in lower case."""
    if version not in ("1.1", "1.0"):
        return f"HTTP/{version} is not supported: send HTTP/1.1."
    if len(fields) != len(lines) and (name := _repeated(lines)) is not None:
        return f"The request has several {name.decode().title()} fields: send one."
    if b"transfer-encoding" in fields and (version == "1.0" or fields[b"transfer-encoding"].lower() != b"chunked"):
        return "Only Transfer-Encoding: chunked is supported, in HTTP/1.1."
    return _host_violation(version, target, fields.get(b"host"))


def size(target: bytes, lines: Iterable[tuple[bytes, bytes]]) -> int:
    """Return the size of the head on the wire, without the method and version."""
    return len(target) + sum(len(name) + len(value) + 4 for name, value in lines)


def _repeated(lines: Sequence[tuple[bytes, bytes]]) -> bytes | None:
    names = [name for name, _ in lines]
    return next((name for name in _SINGLE if names.count(name) > 1), None)


def _host_violation(version: str, target: bytes, host: bytes | None) -> str | None:
    if host is None:
        return "The request has no Host field, which HTTP/1.1 requires." if version == "1.1" else None
    if host_field.parse(host) is None:
        return "The Host field is not a host name or address with an optional port."
    if target[:1] != b"/" and b"://" in target and _authority_of(target).lower() != host.lower():
        return "The host in the request target differs from the Host field."
    return None


def _authority_of(target: bytes) -> bytes:
    """Return the authority of a target in absolute form."""
    return target.partition(b"://")[2].partition(b"/")[0].partition(b"?")[0]
