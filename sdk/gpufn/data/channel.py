"""How this process reaches the platform's data: through the runner in a worker, through HTTP elsewhere."""

from __future__ import annotations

import atexit
import threading
from typing import Protocol

from gpufn_core.errors import InvalidInput
from gpufn_core.protocol.data import Operation


class Channel(Protocol):
    def execute(self, operation: Operation, value: bytes = b"") -> tuple[str, bytes]:
        """Execute an operation; return the content type and the value of the reply. Raises GpufnError."""
        ...


_installed: Channel | None = None
_creating = threading.Lock()


def install(channel: Channel | None) -> None:
    """Use `channel` for every operation of this process, as a worker does."""
    global _installed  # noqa: PLW0603  one per process, by contract
    _installed = channel


def installed() -> Channel | None:
    return _installed


def current() -> Channel:
    """Return the installed channel, or create one over HTTP."""
    if _installed is None:
        from gpufn.client.http import Requests  # noqa: PLC0415  heavy, and not needed in a worker
        from gpufn.data.http_channel import HttpChannel  # noqa: PLC0415

        with _creating:
            if _installed is None:
                client = Requests()
                atexit.register(client.close)
                install(HttpChannel(client))
    assert _installed is not None
    return _installed


def of_worker() -> Channel:
    """Return the channel of this worker. Raises InvalidInput in other processes."""
    if _installed is None:
        raise InvalidInput("only a worker commits with volume.commit(): elsewhere, use `gpufn volume put`")
    return _installed
