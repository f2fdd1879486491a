"""The transport of this process: HTTP outside, the runner's socket inside a worker."""

from __future__ import annotations

import atexit
import threading

from gpufn.call.transport_protocol import Transport

_installed: Transport | None = None
_making = threading.Lock()


def install(transport: Transport | None) -> None:
    """Use `transport` for every call of this process (in a worker); None: make the HTTP client when it is needed."""
    global _installed  # noqa: PLW0603  one per process, by contract
    _installed = transport


def installed() -> Transport | None:
    return _installed


def current() -> Transport:
    if _installed is None:
        from gpufn.client.http_transport import HttpTransport  # noqa: PLC0415  heavy, and no worker needs it

        with _making:
            if _installed is None:
                transport = HttpTransport()
                atexit.register(transport.close)
                install(transport)
    assert _installed is not None
    return _installed
