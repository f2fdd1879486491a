"""Call endpoints of `Client`: invoke, submit, status, result and dead letters.

The client chooses the id of a submitted call, so a submit is safe to retry.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any, Never

from gpufn.call.result_decoding import PLAIN, ResultReader, remote_traceback
from gpufn.client.http import Requests
from gpufn.client.responses import raw_result_of
from gpufn.client.streams import events_of, items_of, lines_of
from gpufn.client.views.calls import DeadLetterView, InvocationView, RawResult, Replayed
from gpufn.declare.hints.argument_checks import check_body, check_seconds
from gpufn_core.encoding import media, values
from gpufn_core.encoding.urls import check_webhook, segment
from gpufn_core.ids import new_invocation_id
from gpufn_core.spec.priority import priority_of

_LONG_POLL_S = 30.0


class CallRequests(Requests):
    """Call endpoints."""

    _reader: ResultReader = PLAIN

    def invoke(self, function: str, /, *unnamed: Never, **arguments: Any) -> Any:
        """Call a deployed function (`name` or `name.method`) with keyword arguments, and return its result."""
        if unnamed:
            raise TypeError("invoke takes keyword arguments only: invoke('f', x=1), or invoke('f', **{'x': 1})")
        with remote_traceback():
            answer = self.invoke_raw(function, values.encode_call((), arguments), media.NATIVE, accept=media.NATIVE)
        return self._reader.decode((answer.content_type, answer.body))

    def invoke_raw(
        self,
        function: str,
        body: bytes,
        content_type: str = media.JSON,
        *,
        accept: str = media.JSON,
        timeout_s: float | None = None,
        priority: str | None = None,
        query: str = "",
    ) -> RawResult:
        """Call a function as `invoke` does, with encoded arguments and an encoded result.

        `priority` is hi, normal or low (default: the function's own class). If the body is one parameter's bytes,
        `query` has the other arguments, as a URL query string.
        """
        options = _call_options(body, content_type, accept, timeout_s, priority)
        path = self._invoke_path(function, query)
        return raw_result_of(self._request("POST", path, **options, timeout=self._no_timeout))

    def stream_raw(
        self,
        function: str,
        body: bytes,
        content_type: str = media.JSON,
        *,
        timeout_s: float | None = None,
        priority: str | None = None,
    ) -> Iterator[tuple[str, bytes]]:
        """Yield the content type and the bytes of a generator's items, in the SDK's encoding.

        Closing the iterator cancels the call.
        """
        options = _call_options(body, content_type, media.ITEMS, timeout_s, priority)
        with self._stream("POST", self._invoke_path(function), **options) as response:
            yield from items_of(self._chunks(response))

    def stream_json(
        self,
        function: str,
        body: bytes,
        content_type: str = media.JSON,
        *,
        timeout_s: float | None = None,
        priority: str | None = None,
        query: str = "",
    ) -> Iterator[Any]:
        """Yield a generator's items as JSON values, read from server-sent events. `query` as for `invoke_raw`."""
        options = _call_options(body, content_type, media.EVENTS, timeout_s, priority)
        with self._stream("POST", self._invoke_path(function, query), **options) as response:
            yield from events_of(lines_of(self._chunks(response)))

    def submit(
        self,
        function: str,
        body: bytes,
        content_type: str = media.JSON,
        *,
        invocation: str | None = None,
        accept: str = media.NATIVE,
        timeout_s: float | None = None,
        webhook: str | None = None,
        priority: str | None = None,
        query: str = "",
    ) -> InvocationView:
        """Queue a call and return. Its result is stored in the content type `accept`.

        Two submits with the same `invocation` id make one call. After `timeout_s` a call that has not ended expires, or
        times out if it has started. The URL `webhook`, instead of the function's own, receives a webhook when the call
        ends; verify it with `gpufn.webhooks.verify`. `query` as for `invoke_raw`.
        """
        options = _call_options(body, content_type, accept, timeout_s, priority)
        id_ = new_invocation_id() if invocation is None else invocation
        path = _with_query(f"{self._function_url(function)}/invocations/{segment(id_)}", query)
        if webhook:
            check_webhook(webhook)
            options["headers"]["x-gpufn-webhook"] = webhook
        return self._json(InvocationView, "PUT", path, **options)

    def invocation(self, id: str) -> InvocationView:  # noqa: A002
        """Return the status of a submitted call."""
        return self._json(InvocationView, "GET", f"/v1/invocations/{segment(id)}")

    def result_raw(self, id: str, *, timeout_s: float | None = None, accept: str = media.NATIVE) -> RawResult:  # noqa: A002
        """Wait for a submitted call and return its result. Raises the call's error, or TimeoutError after `timeout_s`.

        Without `timeout_s`, wait until the call ends.
        """
        check_seconds("timeout_s", timeout_s)
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        path = f"/v1/invocations/{segment(id)}/result"
        while True:
            wait_s = _LONG_POLL_S if deadline is None else max(min(deadline - time.monotonic(), _LONG_POLL_S), 0.0)
            response = self._request("GET", path, params={"wait": f"{wait_s:.3f}"}, headers={"accept": accept})
            if response.status_code != 202:
                return raw_result_of(response)
            if deadline is not None and time.monotonic() >= deadline:
                raise TimeoutError(f"invocation {id} has not ended after {timeout_s:g} s")

    def cancel(self, id: str) -> bool:  # noqa: A002
        """Cancel a submitted call. Return False if it had already ended."""
        return self._member(bool, "cancelled", "DELETE", f"/v1/invocations/{segment(id)}")

    # Dead letters

    def dead_letters(self, function: str | None = None, *, limit: int = 20) -> list[DeadLetterView]:
        """List submitted calls that failed permanently, of one function or of all, newest first.

        Raises FunctionNotFound.
        """
        path = "/v1/dlq" if function is None else f"/v1/dlq/{self._function_path(function)}"
        return self._member(list[DeadLetterView], "letters", "GET", path, params={"limit": str(limit)})

    def dead_letter(self, function: str, id: str) -> DeadLetterView:  # noqa: A002
        """Return a dead letter with its error's traceback. Raises DeadLetterNotFound."""
        return self._json(DeadLetterView, "GET", f"/v1/dlq/{self._function_path(function)}/{segment(id)}")

    def dead_letter_payload(self, function: str, id: str) -> bytes:  # noqa: A002
        """Return the arguments of a dead letter, as the gateway received them."""
        return self._request("GET", f"/v1/dlq/{self._function_path(function)}/{segment(id)}/payload").content

    def replay(self, function: str, id: str) -> Replayed:  # noqa: A002
        """Submit a dead letter again, as a new call of the revision that serves now."""
        view = self._json(InvocationView, "POST", f"/v1/dlq/{self._function_path(function)}/{segment(id)}/replay")
        return Replayed(letter=id, invocation=view.id)

    def replay_all(self, function: str) -> list[Replayed]:
        """Replay a function's dead letters, at most 1,000 per request."""
        return self._member(list[Replayed], "replayed", "POST", f"/v1/dlq/{self._function_path(function)}/replay")

    def drop_dead_letter(self, function: str, id: str) -> int:  # noqa: A002
        """Remove a dead letter and its payload. Return 1."""
        self._request("DELETE", f"/v1/dlq/{self._function_path(function)}/{segment(id)}")
        return 1

    def drop_dead_letters(self, function: str) -> int:
        """Remove all dead letters of a function. Return their number."""
        return self._member(int, "dropped", "DELETE", f"/v1/dlq/{self._function_path(function)}")

    def _invoke_path(self, function: str, query: str = "") -> str:
        return _with_query(f"{self._function_url(function)}/invoke", query)


def _with_query(path: str, query: str) -> str:
    return f"{path}?{query}" if query else path


def _call_options(
    body: bytes, content_type: str, accept: str, timeout_s: float | None, priority: str | None
) -> dict[str, Any]:
    """Return the body and the headers of a call, as options of a request."""
    check_body(body)
    headers = {"content-type": content_type, "accept": accept}
    check_seconds("timeout_s", timeout_s)
    if timeout_s is not None:
        headers["x-gpufn-timeout"] = f"{timeout_s:g}"
    if priority is not None:
        headers["x-gpufn-priority"] = priority_of(priority).value
    return {"content": body, "headers": headers}
