"""Header fields between a client and a web application: which are passed on, and which stay at the gateway. Pure.

The API key of the caller is not shown to the application, whose code may belong to another team. Fields of one
connection end at the gateway (RFC 9110, 7.6.1).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

from gpufn_core.errors import FunctionRaised
from gpufn_gateway.auth.access import is_our_credential
from gpufn_gateway.web.cookies import confined

_OF_THE_CONNECTION: Final = frozenset(
    {b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"te", b"trailer",
     b"transfer-encoding", b"upgrade"}
)  # fmt: skip
_OF_THE_HANDSHAKE: Final = frozenset(
    {b"sec-websocket-accept", b"sec-websocket-extensions", b"sec-websocket-protocol", b"sec-websocket-version"}
)
# These fields are about the whole origin, which is common to all applications: a service worker for all paths, the
# deletion of all cookies, another server for all requests, reports about all requests, TLS for years, a hold on windows
# of the console (docs/decisions/0074-web-console.md). The last two are the gateway's own.
_OF_THE_ORIGIN: Final = frozenset(
    {b"service-worker-allowed", b"clear-site-data", b"alt-svc", b"nel", b"report-to", b"reporting-endpoints",
     b"strict-transport-security", b"public-key-pins", b"expect-ct", b"origin-agent-cluster", b"accept-ch",
     b"critical-ch", b"cross-origin-opener-policy", b"x-request-id", b"x-gpufn-invocation"}
)  # fmt: skip
_NAME: Final = re.compile(rb"[A-Za-z0-9!#$%&'*+.^_`|~-]+")
_BAD_IN_VALUE: Final = re.compile(rb"[\x00\r\n]")

# For the responses of the gateway itself.
NOT_STORED: Final = [(b"cache-control", b"no-store"), (b"x-content-type-options", b"nosniff")]

Fields = tuple[tuple[bytes, bytes], ...]


def to_application(headers: Iterable[tuple[bytes, bytes]], *, is_public: bool) -> Fields:
    """Return the fields of a request for the application.

    >>> to_application([(b"authorization", b"Bearer gpufn_1_2"), (b"range", b"bytes=0-9")], is_public=True)
    ((b'range', b'bytes=0-9'),)
    """
    return tuple(
        (name, value)
        for name, value in headers
        if name not in _OF_THE_CONNECTION
        and not (name == b"authorization" and (not is_public or is_our_credential(value)))
    )


def to_client(
    headers: Iterable[tuple[bytes, bytes]], root: str, *, is_socket: bool = False
) -> list[tuple[bytes, bytes]]:
    """Return the fields of a response for the client. `root` is the path of the application. Raises FunctionRaised for
    a field that HTTP does not allow."""
    left_out = _OF_THE_CONNECTION | _OF_THE_ORIGIN | (_OF_THE_HANDSHAKE if is_socket else frozenset())
    passed_on = []
    for name, value in headers:
        if _NAME.fullmatch(name) is None or _BAD_IN_VALUE.search(value):
            raise FunctionRaised("The application sent a header field that HTTP does not allow.")
        if (lower := name.lower()) not in left_out:
            passed_on.append((lower, confined(value, root) if lower == b"set-cookie" else value))
    return passed_on
