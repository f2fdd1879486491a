"""How a Function reaches the platform: over HTTP from outside, over its own socket inside a worker.

`Function.remote` and its siblings speak to a Transport and do not know which one it is. A worker installs its own
with `install`; everywhere else the HTTP client is made on first use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

from gpufn.invocation import InvocationState


class Transport(Protocol):
    """Values travel encoded (`gpufn.values`): a content type and bytes. Failures are raised from `gpufn.errors`."""

    def call(
        self, function: str, method: str, content_type: str, body: bytes, *, timeout_s: float | None = None
    ) -> tuple[str, bytes]:
        """Invoke and wait: the result's content type and bytes."""
        ...

    def stream(
        self, function: str, method: str, content_type: str, body: bytes, *, timeout_s: float | None = None
    ) -> Iterator[tuple[str, bytes]]:
        """Invoke a generator: its items as they come. Closing the iterator cancels."""
        ...

    def submit(self, function: str, method: str, content_type: str, body: bytes) -> str:
        """Queue and return: the invocation's id."""
        ...

    def status(self, invocation: str) -> InvocationState: ...

    def result(self, invocation: str, *, timeout_s: float | None = None) -> tuple[str, bytes]:
        """Wait for a submitted invocation's end: its result, or its error raised. TimeoutError when still running."""
        ...

    def cancel(self, invocation: str) -> bool:
        """False when it had ended already."""
        ...


_installed: Transport | None = None
_default: Callable[[], Transport] | None = None


def install(transport: Transport) -> None:
    """Use `transport` for every call of this process (in a worker)."""
    global _installed
    _installed = transport


def set_default(make: Callable[[], Transport]) -> None:
    """Where a transport comes from when none is installed (`gpufn._client` registers itself)."""
    global _default
    _default = make


def current() -> Transport:
    global _installed
    if _installed is None:
        if _default is None:
            raise RuntimeError("no transport is installed")
        _installed = _default()
    return _installed
