"""The current Transport of this process: HTTP outside a worker, the runner's socket inside."""

from __future__ import annotations

import atexit
import threading
from typing import TYPE_CHECKING

from gpufn.call.transport_protocol import Transport
from gpufn.notebook.kernel import is_notebook

if TYPE_CHECKING:
    from gpufn.client.http_transport import HttpTransport

_installed: Transport | None = None
_creating = threading.Lock()


def install(transport: Transport | None) -> None:
    """Use `transport` for every call of this process, as a worker does. None: create the HTTP client on first use."""
    global _installed  # noqa: PLW0603  one per process, by contract
    _installed = transport


def installed() -> Transport | None:
    return _installed


def current() -> Transport:
    """Return the installed transport, or create the HTTP client."""
    if _installed is None:
        with _creating:
            if _installed is None:
                transport = _make_transport()
                atexit.register(transport.close)
                install(transport)
    assert _installed is not None
    return _installed


def _make_transport() -> HttpTransport:
    # The modules are heavy, and not needed in a worker.
    if is_notebook():
        from gpufn.notebook.transport import NotebookTransport  # noqa: PLC0415

        return NotebookTransport()
    from gpufn.client.http_transport import HttpTransport  # noqa: PLC0415

    return HttpTransport()
