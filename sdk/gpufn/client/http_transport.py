"""HTTP Transport for `.remote` and related methods, in every process except workers."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from gpufn.call.transport_protocol import EncodedCall, Target
from gpufn.client.call_api import CallApi
from gpufn.client.views.calls import InvocationView, MapView
from gpufn.client.wait_reports import ReasonLines, Subject, WaitReports
from gpufn.declare.declarations import declarations_of
from gpufn.maps.reader import ItemOutcome
from gpufn_core.domain.invocation import InvocationState
from gpufn_core.encoding import media
from gpufn_core.errors import DeployedCodeDiffers, FunctionNotFound

T = TypeVar("T")

_log = logging.getLogger("gpufn")


class HttpTransport:
    """`Transport` over HTTP. The first call creates the client. Reasons for waits that last are logged."""

    caller_level = 5  # stack level of the `f.remote(x)` line from _calling: above contextlib, the transport, the Remote

    def __init__(self, make_client: Callable[[], CallApi] = CallApi) -> None:
        self._make_client = make_client
        self._client: CallApi | None = None
        self._pid = 0
        self._lock = threading.Lock()  # a `map` makes its first calls concurrently
        self._compared: set[str] = set()
        self._waits = WaitReports(lambda: self.client, ReasonLines(_log.warning))

    @property
    def client(self) -> CallApi:
        with self._lock:
            if self._client is None or self._pid != os.getpid():  # a forked process must not share connections
                self._client, self._pid = self._make_client(), os.getpid()
            return self._client

    def close(self) -> None:
        self._waits.close()
        if self._client is not None:
            self._client.close()
            self._client = None

    @contextlib.contextmanager
    def _calling(self, function: str) -> Iterator[None]:
        """Warn on the first call of each function if the deployed code differs from its file here."""
        with self._lock:
            is_first = function not in self._compared
            self._compared.add(function)
        if is_first and declarations_of(function):
            from gpufn.deploy.deployed_code import difference  # noqa: PLC0415

            if warning := difference(self.client, function):
                warnings.warn(warning, DeployedCodeDiffers, stacklevel=self.caller_level)
        with _deploy_hint(function):
            yield

    def watching(self, subject: Subject) -> contextlib.AbstractContextManager[None]:
        """Report why `subject` waits, until the block ends."""
        return self._waits.watching(subject)

    def call(self, call: EncodedCall) -> tuple[str, bytes]:
        target, content_type, body, timeout_s = call
        with self._calling(target.function), self.watching(Subject("function", target.function)):
            answer = self.client.invoke_raw(
                target.path, body, content_type, accept=media.NATIVE, timeout_s=timeout_s, priority=target.priority
            )
        return answer.content_type, answer.body

    def stream(self, call: EncodedCall) -> Iterator[tuple[str, bytes]]:
        target, content_type, body, timeout_s = call
        with self._calling(target.function):
            items = self.client.stream_raw(
                target.path, body, content_type, timeout_s=timeout_s, priority=target.priority
            )
            yield from self._watch_first(Subject("function", target.function), items)

    def submit(self, call: EncodedCall) -> str:
        target, content_type, body, timeout_s = call
        with self._calling(target.function):
            view = self.client.submit(target.path, body, content_type, timeout_s=timeout_s, priority=target.priority)
        return view.id

    def status(self, invocation: str) -> InvocationState:
        return self.client.invocation(invocation).state

    def view(self, invocation: str) -> InvocationView:
        return self.client.invocation(invocation)

    def result(self, invocation: str, *, timeout_s: float | None = None) -> tuple[str, bytes]:
        with self.watching(Subject("call", invocation)):
            answer = self.client.result_raw(invocation, timeout_s=timeout_s)
        return answer.content_type, answer.body

    def cancel(self, invocation: str) -> bool:
        return self.client.cancel(invocation)

    def send_items(self, target: Target, map_id: str, first: int, items: Sequence[bytes], *, is_last: bool) -> MapView:
        with self._calling(target.function):
            return self.client.send_items(
                target.path, map_id, first, items,
                content_type=_type_of(items), accept=media.NATIVE, last=is_last, priority=target.priority,
            )  # fmt: skip

    def outcomes(self, map_id: str, after: str) -> Iterator[list[ItemOutcome]]:
        return self._watch_first(Subject("map", map_id), self.client.outcomes_raw(map_id, after))

    def map_status(self, map_id: str) -> MapView:
        return self.client.map(map_id)

    def cancel_map(self, map_id: str) -> bool:
        return self.client.cancel_map(map_id)

    def _watch_first(self, subject: Subject, items: Iterator[T]) -> Iterator[T]:
        """Yield the items. Report why `subject` waits until the first item."""
        with contextlib.ExitStack() as stack:
            if callable(close := getattr(items, "close", None)):
                stack.callback(close)
            with self.watching(subject):
                first = list(itertools.islice(items, 1))
            yield from first
            yield from items


@contextlib.contextmanager
def _deploy_hint(function: str) -> Iterator[None]:
    try:
        yield
    except FunctionNotFound as error:
        if "no function" not in error.message:  # the function exists but has no such method
            raise
        python_name = function.replace("-", "_")
        here = (
            f", or a function of this process with Client().deploy({python_name})" if python_name.isidentifier() else ""
        )
        raise FunctionNotFound(
            f"{error.message.rstrip('.')} at this gateway; deploy its file with `gpufn deploy FILE`{here}; "
            "`gpufn ls` lists the functions"
        ) from None


def _type_of(items: Sequence[bytes]) -> str:
    """Return the content type of a chunk: pickled if any of its items is."""
    from gpufn_core.encoding import values  # noqa: PLC0415

    return media.PICKLED if any(values.call_type(item) == media.PICKLED for item in items) else media.NATIVE
