"""Calls over HTTP: the part of `Client` that invokes and submits, asks what became of a call, and reads dead letters.

A submitted call gets its id here, so submitting is safe to repeat.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any, Never

from gpufn.call.result_decoding import PLAIN, ResultReader, remote_traceback
from gpufn.client.http import Requests
from gpufn.client.responses import answer_of
from gpufn.client.streams import events_of, items_of, lines_of
from gpufn.client.views import (
    AllReplayed,
    Answer,
    Cancellation,
    DeadLetters,
    DeadLetterView,
    Dropped,
    InvocationView,
    Replayed,
)
from gpufn.declare.argument_checks import check_body, check_seconds
from gpufn_core.encoding import media, values
from gpufn_core.encoding.urls import check_webhook, segment
from gpufn_core.ids import new_invocation_id
from gpufn_core.spec.priority import priority_of

_LONGEST_WAIT_S = 30.0  # of one request for a result


class CallRequests(Requests):
    """The endpoints of calls."""

    _reader: ResultReader = PLAIN

    def invoke(self, function: str, /, *unnamed: Never, **arguments: Any) -> Any:
        """Call a deployed function (`name`, or `name.method`) and wait for its result. Arguments have names."""
        if unnamed:
            raise TypeError("invoke takes arguments by their names: invoke('f', x=1), or invoke('f', **{'x': 1})")
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
    ) -> Answer:
        """As `invoke`, with bytes in and out. `priority` is hi, normal or low; None: the function's own class. `query`,
        as in a URL, has the arguments beside a body that is one parameter's bytes."""
        check_body(body)
        headers = _call_headers(content_type, accept, timeout_s, priority)
        path = _with_query(f"/v1/functions/{segment(function)}/invoke", query)
        response = self._request("POST", path, content=body, headers=headers, timeout=self._endless)
        return answer_of(response)

    def stream_raw(
        self,
        function: str,
        body: bytes,
        content_type: str = media.JSON,
        *,
        timeout_s: float | None = None,
        priority: str | None = None,
    ) -> Iterator[tuple[str, bytes]]:
        """The items of a generator, content type and bytes, in the SDK's encoding. Closing the iterator cancels."""
        check_body(body)
        headers = _call_headers(content_type, media.ITEMS, timeout_s, priority)
        path = f"/v1/functions/{segment(function)}/invoke"
        with self._stream("POST", path, content=body, headers=headers) as response:
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
        """The items of a generator as JSON values, by server-sent events. `query` as for `invoke_raw`."""
        check_body(body)
        headers = _call_headers(content_type, media.EVENTS, timeout_s, priority)
        path = _with_query(f"/v1/functions/{segment(function)}/invoke", query)
        with self._stream("POST", path, content=body, headers=headers) as response:
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
        """Queue a call and return; its result is kept as `accept`. The same `invocation` id twice is one call.

        What has not ended after `timeout_s` is ended: expired, or timed out if it has started. Its end is told to
        `webhook`, an address, in place of the function's; `gpufn.webhooks.verify` checks what comes. `query` as for
        `invoke_raw`.
        """
        check_body(body)
        id_ = new_invocation_id() if invocation is None else invocation
        path = _with_query(f"/v1/functions/{segment(function)}/invocations/{segment(id_)}", query)
        headers = _call_headers(content_type, accept, timeout_s, priority)
        if webhook:
            check_webhook(webhook)
            headers["x-gpufn-webhook"] = webhook
        return self._json(InvocationView, "PUT", path, content=body, headers=headers)

    def invocation(self, id: str) -> InvocationView:  # noqa: A002
        """How a submitted call stands."""
        return self._json(InvocationView, "GET", f"/v1/invocations/{segment(id)}")

    def result_raw(self, id: str, *, timeout_s: float | None = None, accept: str = media.NATIVE) -> Answer:  # noqa: A002
        """Wait for the end of a submitted call. Raises its error, or TimeoutError while it still runs."""
        check_seconds("timeout_s", timeout_s)
        give_up = None if timeout_s is None else time.monotonic() + timeout_s
        path = f"/v1/invocations/{segment(id)}/result"
        while True:
            wait = _LONGEST_WAIT_S if give_up is None else max(min(give_up - time.monotonic(), _LONGEST_WAIT_S), 0.0)
            response = self._request("GET", path, params={"wait": f"{wait:.3f}"}, headers={"accept": accept})
            if response.status_code != 202:
                return answer_of(response)
            if give_up is not None and time.monotonic() >= give_up:
                raise TimeoutError(f"invocation {id} has not ended after {timeout_s:g} s")

    def cancel(self, id: str) -> bool:  # noqa: A002
        """False when it had ended already."""
        return self._json(Cancellation, "DELETE", f"/v1/invocations/{segment(id)}").cancelled

    # Dead letters

    def dead_letters(self, function: str | None = None, *, limit: int = 20) -> list[DeadLetterView]:
        """Submitted calls that failed for good, of a function or of all, the newest first. Raises FunctionNotFound."""
        path = "/v1/dlq" if function is None else f"/v1/dlq/{segment(function)}"
        return self._json(DeadLetters, "GET", path, params={"limit": str(limit)}).letters

    def dead_letter(self, function: str, id: str) -> DeadLetterView:  # noqa: A002
        """One, with its error's traceback. Raises DeadLetterNotFound."""
        return self._json(DeadLetterView, "GET", f"/v1/dlq/{segment(function)}/{segment(id)}")

    def dead_letter_payload(self, function: str, id: str) -> bytes:  # noqa: A002
        """The arguments that it was called with, as they came."""
        return self._request("GET", f"/v1/dlq/{segment(function)}/{segment(id)}/payload").content

    def replay(self, function: str, id: str) -> Replayed:  # noqa: A002
        """Submit it again, as a new call of the revision that serves now."""
        view = self._json(InvocationView, "POST", f"/v1/dlq/{segment(function)}/{segment(id)}/replay")
        return Replayed(letter=id, invocation=view.id)

    def replay_all(self, function: str) -> list[Replayed]:
        """At most a thousand at a time."""
        return self._json(AllReplayed, "POST", f"/v1/dlq/{segment(function)}/replay").replayed

    def drop_dead_letter(self, function: str, id: str) -> int:  # noqa: A002
        """Remove it and its payload; returns 1."""
        self._request("DELETE", f"/v1/dlq/{segment(function)}/{segment(id)}")
        return 1

    def drop_dead_letters(self, function: str) -> int:
        """Remove all of a function; returns how many."""
        return self._json(Dropped, "DELETE", f"/v1/dlq/{segment(function)}").dropped


def _with_query(path: str, query: str) -> str:
    return f"{path}?{query}" if query else path


def _call_headers(content_type: str, accept: str, timeout_s: float | None, priority: str | None) -> dict[str, str]:
    headers = {"content-type": content_type, "accept": accept}
    check_seconds("timeout_s", timeout_s)
    if timeout_s is not None:
        headers["x-gpufn-timeout"] = f"{timeout_s:g}"
    if priority is not None:
        headers["x-gpufn-priority"] = priority_of(priority).value
    return headers
