"""Interface between remote calls and the platform.

`Function.remote` and the other remote calls use a Transport without knowing its kind: HTTP outside a worker, the
runner's socket inside. A worker installs its own; elsewhere the HTTP client is created on first use.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

from gpufn_core.domain.invocation import InvocationState
from gpufn_core.spec.priority import Priority

if TYPE_CHECKING:
    from gpufn.client.views.calls import InvocationView, MapView
    from gpufn.maps.reader import ItemOutcome


class Target(NamedTuple):
    """The function or method to call. `priority` None means the function's own."""

    function: str
    method: str = ""
    priority: Priority | None = None

    @property
    def path(self) -> str:
        """The name in a URL: `function`, or `function.method`."""
        return f"{self.function}.{self.method}" if self.method else self.function


class EncodedCall(NamedTuple):
    """A call with its encoded arguments (`gpufn_core.encoding.values`).

    A call that has not ended after `timeout_s` is stopped: it expires, or times out if it has started. None means the
    function's own timeout.
    """

    target: Target
    content_type: str
    body: bytes
    timeout_s: float | None = None


class Transport(Protocol):
    """The calls that a function can make to the platform.

    A result is a content type and bytes (`gpufn_core.encoding.values`). Failures are raised as the errors of
    `gpufn.errors`.
    """

    def call(self, call: EncodedCall) -> tuple[str, bytes]:
        """Invoke and wait. Return the content type and the bytes of the result."""
        ...

    def stream(self, call: EncodedCall) -> Iterator[tuple[str, bytes]]:
        """Invoke a generator and yield its items as they come. Closing the iterator cancels the call."""
        ...

    def submit(self, call: EncodedCall) -> str:
        """Queue an invocation and return its id."""
        ...

    def status(self, invocation: str) -> InvocationState: ...

    def result(self, invocation: str, *, timeout_s: float | None = None) -> tuple[str, bytes]:
        """Wait for the end of a submitted invocation, and return its result or raise its error.

        Raises TimeoutError if it still runs.
        """
        ...

    def cancel(self, invocation: str) -> bool:
        """Cancel an invocation. Return False if it had already ended."""
        ...


@runtime_checkable
class ViewTransport(Protocol):
    """A Transport that shows calls."""

    def view(self, invocation: str) -> InvocationView: ...


@runtime_checkable
class MapTransport(Protocol):
    """A Transport to a platform that stores maps (`gpufn.maps.map`)."""

    def send_items(self, target: Target, map_id: str, first: int, items: Sequence[bytes], *, is_last: bool) -> MapView:
        """Submit the encoded items `first` and following. Sending the same items again has no effect."""
        ...

    def outcomes(self, map_id: str, after: str) -> Iterator[list[ItemOutcome]]:
        """Yield the outcomes after a cursor as they come. Closing the iterator ends the request."""
        ...

    def map_status(self, map_id: str) -> MapView:
        """Return the state of a map. Raises MapNotFound."""
        ...

    def cancel_map(self, map_id: str) -> bool:
        """Cancel the items of a map that have not ended. Return False if all of them had ended."""
        ...

    def result(self, invocation: str, *, timeout_s: float | None = None) -> tuple[str, bytes]: ...
