"""`Call`: the handle of a submitted invocation."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Generic, NoReturn, TypeVar, cast

from gpufn.call import transport
from gpufn.call.result_decoding import PLAIN, ResultReader, remote_traceback
from gpufn.call.threads import in_thread
from gpufn.call.transport_protocol import ViewTransport
from gpufn.declare.hints.argument_checks import check_seconds
from gpufn.declare.hints.did_you_mean import CALL_HINTS, attribute_error
from gpufn_core.domain.invocation import InvocationState
from gpufn_core.errors import GpufnError, InvalidInput
from gpufn_core.ids import is_call_or_item_id

V = TypeVar("V")  # the result of a remote call


class Call(Generic[V]):
    """A submitted invocation. It continues when this process ends. Its result is stored for the function's `retention`.

    >>> from gpufn import gpu_function
    >>> from gpufn.testing import run_locally
    >>> @gpu_function
    ... def nap(x: int) -> int:
    ...     return x * x
    >>> with run_locally():
    ...     call = nap.spawn(7)
    ...     again = Call.from_id(call.id)  # also works later, in another process
    ...     again.result(timeout=10), again.status().value, again.cancel()
    (49, 'succeeded', False)
    """

    def __init__(self, id: str, reader: ResultReader = PLAIN) -> None:  # noqa: A002
        self.id = id
        self._reader = reader

    @classmethod
    def from_id(cls, id: str, *, trust_results: bool = False) -> Call[Any]:  # noqa: A002
        """Return the Call of an invocation that was submitted elsewhere or earlier.

        With `trust_results`, its result may be a pickle, which runs code that the function chose.
        """
        if not isinstance(id, str) or not is_call_or_item_id(id):
            raise InvalidInput(f"{id!r} is not an invocation's id, which has 26 letters and digits")
        return Call(id, PLAIN.with_trust() if trust_results else PLAIN)

    def status(self) -> InvocationState:
        """Return the state: queued, running, or how the call ended."""
        return transport.current().status(self.id)

    def result(self, timeout: float | None = None) -> V:
        """Wait for the result. Raises TimeoutError if the call still runs after `timeout` seconds."""
        check_seconds("timeout", timeout)
        with remote_traceback():
            return cast("V", self._reader.decode(transport.current().result(self.id, timeout_s=timeout)))

    def cancel(self) -> bool:
        """Cancel the call. Returns False if it had already ended."""
        return transport.current().cancel(self.id)

    @property
    def aio(self) -> AsyncCall[V]:
        """The same methods for asyncio."""
        return AsyncCall(self)

    if not TYPE_CHECKING:  # so that type checkers still refuse unknown attributes

        def __getattr__(self, name: str) -> NoReturn:
            raise attribute_error(self, name, CALL_HINTS)

    def _repr_html_(self) -> str | None:
        """Return the state, and why the call waits, for a notebook. None if the gateway does not respond now."""
        current = transport.current()
        if not isinstance(current, ViewTransport):
            return None
        with contextlib.suppress(GpufnError):
            return current.view(self.id)._repr_html_()
        return None

    def __repr__(self) -> str:
        return f"Call({self.id!r})"


class AsyncCall(Generic[V]):
    """The methods of a Call for asyncio."""

    def __init__(self, call: Call[V]) -> None:
        self._call = call

    async def status(self) -> InvocationState:
        return await in_thread(self._call.status)

    async def result(self, timeout: float | None = None) -> V:
        return await in_thread(self._call.result, timeout)

    async def cancel(self) -> bool:
        return await in_thread(self._call.cancel)
