"""Predictions: requests as arguments and options, and calls in Replicate's terms."""

from __future__ import annotations

import base64
import re
from typing import Any, Final

import msgspec

from gpufn_core.domain.invocation import InvocationState
from gpufn_core.encoding import media
from gpufn_core.encoding.msgspec_errors import parse_validation_error
from gpufn_core.errors import InvalidInput
from gpufn_core.protocol.records import CallRecord
from gpufn_gateway.arguments.json_body import decode_json
from gpufn_gateway.protocols.captured import Outcome
from gpufn_gateway.protocols.platform import CallOptions
from gpufn_gateway.protocols.replicate import models
from gpufn_gateway.submitted import call_views
from gpufn_gateway.webhooks.payload import Payload

PREFIX: Final = "/replicate/v1"
FORM: Final = "replicate"  # of its webhooks
_LONGEST_WAIT_S: Final = 60
_EVENTS: Final = frozenset({"start", "output", "logs", "completed"})
_BAR_CHARS: Final = 10
_WAIT: Final = re.compile(r"wait(?:=(\d{1,4}))?")
_STATUSES: Final = {
    InvocationState.QUEUED: "starting",
    InvocationState.RUNNING: "processing",
    InvocationState.SUCCEEDED: "succeeded",
    InvocationState.CANCELLED: "canceled",
}


class NewPrediction(msgspec.Struct, forbid_unknown_fields=True):
    """The body of a new prediction. `input` has the keyword arguments of the function."""

    input: dict[str, Any] = {}
    version: str | None = None
    webhook: str | None = None
    webhook_completed: str | None = None  # as `webhook` for the event `completed`
    webhook_events_filter: list[str] | None = None
    stream: bool | None = None

    def options(self) -> CallOptions:
        """Return the options of the call. Raises InvalidInput."""
        events = _EVENTS if self.webhook_events_filter is None else frozenset(self.webhook_events_filter)
        if unknown := events - _EVENTS:
            raise InvalidInput(
                f"webhook_events_filter has {min(unknown)[:40]!r}; there are {', '.join(sorted(_EVENTS))}",
                field="webhook_events_filter",
            )
        url = self.webhook_completed or (self.webhook if "completed" in events else None)
        return CallOptions(webhook=url, webhook_form=FORM, is_live=bool(self.stream))


def new_prediction(body: bytes) -> NewPrediction:
    """Parse the body of a new prediction. Raises InvalidInput with the field."""
    try:
        return decode_json(body, NewPrediction)
    except msgspec.ValidationError as error:
        found = parse_validation_error(str(error))
        if found.is_unknown:
            known = ", ".join(NewPrediction.__struct_fields__)
            raise InvalidInput(
                f"{found.path}: not supported; a prediction may have {known}", field=found.path
            ) from None
        raise InvalidInput(f"{found.path or 'the body'}: {found.text}", field=found.path or None) from None


def wait_s(prefer: str) -> int:
    """Return the seconds to wait that the header `Prefer` requests.

    >>> wait_s("wait"), wait_s("wait=5"), wait_s("wait=900"), wait_s("respond-async")
    (60, 5, 60, 0)
    """
    asked = _WAIT.search(prefer)
    return 0 if asked is None else min(int(asked[1] or _LONGEST_WAIT_S), _LONGEST_WAIT_S)


def prediction(
    view: dict[str, Any], outcome: Outcome | None = None, *, base: str = "", given: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Return a prediction from the status of its call. `base` is the URL of the gateway; `given` is the input."""
    url = f"{base}{PREFIX}/predictions/{view['id']}"
    ended_at, error, run_s = view["ended_at"], view["error"], view["run_s"]
    metrics: dict[str, float] = {} if run_s is None else {"predict_time": run_s}
    if ended_at is not None:
        metrics["total_time"] = ended_at - view["submitted_at"]
    return {
        "id": view["id"],
        "model": "/".join(models.model_of(view["function"])),
        "version": models.version_id(view["function"], view["revision"]),
        "status": status(view["state"]),
        "input": given,
        "output": None if outcome is None else output(outcome),
        "error": None if error is None else error.message,
        "logs": _progress_bar(view["progress"]),
        "metrics": metrics,
        "created_at": models.timestamp(view["submitted_at"]),
        "started_at": None if view["started_at"] is None else models.timestamp(view["started_at"]),
        "completed_at": None if ended_at is None else models.timestamp(ended_at),
        "data_removed": False,
        "source": "api",
        "urls": {"get": url, "cancel": f"{url}/cancel", "stream": f"{url}/stream"},
    }


def status(state: InvocationState) -> str:
    """Return a state in Replicate's terms.

    >>> status(InvocationState.QUEUED), status(InvocationState.EXPIRED)
    ('starting', 'failed')
    """
    return _STATUSES.get(state, "failed")


def output(outcome: Outcome) -> msgspec.Raw:
    """Return a result as JSON. Bytes become a data URL, which the client reads as a file."""
    if outcome.content_type == media.JSON:
        return msgspec.Raw(outcome.body)
    return msgspec.Raw(msgspec.json.encode(data_url(outcome.content_type, outcome.body)))


def data_url(content_type: str, data: bytes) -> str:
    return f"data:{content_type};base64,{base64.b64encode(data).decode()}"


def webhook_payload(record: CallRecord, result: bytes) -> Payload:
    """Return the webhook of a prediction that has ended. A result above the size of a record is omitted."""
    is_whole = record.state is InvocationState.SUCCEEDED and not record.blob
    outcome = Outcome(record.content_type, result, []) if is_whole else None
    return Payload(msgspec.json.encode(prediction(call_views.status(record), outcome)))


def _progress_bar(progress: Any) -> str:
    """Return progress as the line of tqdm that the client reads it from."""
    if progress is None:
        return ""
    percent = round(progress.fraction * 100)
    bar = "#" * round(progress.fraction * _BAR_CHARS)
    return f"{percent:3d}%|{bar:{_BAR_CHARS}}| {percent}/100 {progress.message}\n"


# --- server-sent events -----------------------------------------------------------------------------------------------


def item_event(number: int, content_type: str, body: bytes) -> bytes:
    """Return the event for an item of a generator."""
    return _event("output", number, _text(msgspec.json.decode(output(Outcome(content_type, body, [])))))


def events(view: dict[str, Any], outcome: Outcome | None, *, streams: bool, sent: int = 0) -> bytes:
    """Return the events of a prediction that has ended: its output, for a generator one per item after the first
    `sent`, and `done`."""
    written: list[bytes] = []
    if outcome is not None:
        value = msgspec.json.decode(output(outcome))
        items = list(enumerate(value if streams else [value]))[sent:]
        written += [_event("output", number, _text(item)) for number, item in items]
    end = {"canceled": '{"reason":"canceled"}', "failed": '{"reason":"error"}'}.get(status(view["state"]), "{}")
    number = sent + len(written)
    if view["error"] is not None and status(view["state"]) == "failed":
        written.append(_event("error", number, view["error"].message))
    return b"".join([*written, _event("done", number + 1, end)])


def _text(value: object) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


def _event(name: str, number: int, text: str) -> bytes:
    """Return one event. The client drops an event without an id."""
    lines = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
    return f"event: {name}\nid: {number}\n{''.join(f'data: {line}{chr(10)}' for line in lines)}\n".encode()
