"""How a Function reaches the platform: over HTTP from outside, over its own socket inside a worker.

`Function.remote` and its siblings speak to a Transport and do not know which one it is. A worker installs its own
with `install`; everywhere else the HTTP client is made on first use.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

from gpufn_core.domain.invocation import InvocationState
from gpufn_core.spec.priority import Priority

if TYPE_CHECKING:
    from gpufn.client.views import MapView
    from gpufn.maps.reader import End


class Transport(Protocol):
    """Values travel encoded (`gpufn_core.encoding.values`): a content type and bytes. Failures are raised from `gpufn.errors`.

    What has not ended after `timeout_s` is ended: expired, or timed out if it has started. None: the function's own
    time; of `priority`, its own class.
    """

    def call(
        self,
        function: str,
        method: str,
        content_type: str,
        body: bytes,
        *,
        timeout_s: float | None = None,
        priority: Priority | None = None,
    ) -> tuple[str, bytes]:
        """Invoke and wait: the result's content type and bytes."""
        ...

    def stream(
        self,
        function: str,
        method: str,
        content_type: str,
        body: bytes,
        *,
        timeout_s: float | None = None,
        priority: Priority | None = None,
    ) -> Iterator[tuple[str, bytes]]:
        """Invoke a generator: its items as they come. Closing the iterator cancels."""
        ...

    def submit(
        self,
        function: str,
        method: str,
        content_type: str,
        body: bytes,
        *,
        timeout_s: float | None = None,
        priority: Priority | None = None,
    ) -> str:
        """Queue and return: the invocation's id."""
        ...

    def status(self, invocation: str) -> InvocationState: ...

    def result(self, invocation: str, *, timeout_s: float | None = None) -> tuple[str, bytes]:
        """Wait for a submitted invocation's end: its result, or its error raised. TimeoutError when still running."""
        ...

    def cancel(self, invocation: str) -> bool:
        """False when it had ended already."""
        ...


class MapTarget(NamedTuple):
    """What a map calls. `priority` None: the function's own class."""

    function: str
    method: str = ""
    priority: Priority | None = None


@runtime_checkable
class KeepsMaps(Protocol):
    """A Transport to where maps are kept (`gpufn.maps.map`)."""

    def send_items(
        self, target: MapTarget, map_id: str, first: int, items: Sequence[bytes], *, is_last: bool
    ) -> MapView:
        """Submit items `first` and following, encoded; again, they are the same ones."""
        ...

    def outcomes(self, map_id: str, after: str) -> Iterator[list[End]]:
        """The ends behind a cursor, as they come. Closing the iterator stops that."""
        ...

    def map_status(self, map_id: str) -> MapView:
        """Raises MapNotFound."""
        ...

    def cancel_map(self, map_id: str) -> bool:
        """False when all its items had ended."""
        ...

    def result(self, invocation: str, *, timeout_s: float | None = None) -> tuple[str, bytes]: ...
