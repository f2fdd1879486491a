"""The rules of RFC 9112 for a request's head that the parser does not enforce. Pure.

llhttp refuses by itself: folded lines, Transfer-Encoding beside Content-Length, a second Content-Length, one that is no
number, and line ends other than CRLF.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from gpufn_gateway.http import host_field

# Fields that a request has once. A proxy in front may have judged the first line, and we would read the last.
_SINGLE: Final = (b"host", b"authorization", b"origin", b"content-type", b"transfer-encoding")


def fault(
    version: str, target: bytes, lines: Sequence[tuple[bytes, bytes]], fields: Mapping[bytes, bytes]
) -> str | None:
    """The reason to refuse a request with 400, or None. `fields` are `lines` as a dict, with names in lower case."""
    if version not in ("1.1", "1.0"):
        return f"HTTP/{version} is not served here: send HTTP/1.1."
    if len(fields) != len(lines) and (name := _repeated(lines)) is not None:
        return f"The request has several {name.decode().title()} fields: send one."
    if b"transfer-encoding" in fields and (version == "1.0" or fields[b"transfer-encoding"].lower() != b"chunked"):
        return "The only Transfer-Encoding that is served is chunked, in HTTP/1.1."
    return _host_fault(version, target, fields.get(b"host"))


def size(target: bytes, lines: Iterable[tuple[bytes, bytes]]) -> int:
    """The head's bytes on the wire, without the few of its method and version."""
    return len(target) + sum(len(name) + len(value) + 4 for name, value in lines)


def _repeated(lines: Sequence[tuple[bytes, bytes]]) -> bytes | None:
    names = [name for name, _ in lines]
    return next((name for name in _SINGLE if names.count(name) > 1), None)


def _host_fault(version: str, target: bytes, host: bytes | None) -> str | None:
    if host is None:
        return "The request has no Host field, which HTTP/1.1 requires." if version == "1.1" else None
    if host_field.parse(host) is None:
        return "The Host field is not a host name or address with an optional port."
    if target[:1] != b"/" and b"://" in target and _authority_of(target).lower() != host.lower():
        return "The request's target names another host than its Host field."
    return None


def _authority_of(target: bytes) -> bytes:
    """Of a target in absolute form."""
    return target.partition(b"://")[2].partition(b"/")[0].partition(b"?")[0]
