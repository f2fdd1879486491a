"""CloudEvents 1.0 over HTTP, in binary and structured mode. Pure."""

from __future__ import annotations

import base64
import binascii
import datetime
import re
from collections.abc import Mapping
from typing import Any, Final, NamedTuple
from urllib.parse import quote, unquote

import msgspec

from gpufn_core.encoding import media
from gpufn_core.encoding.msgspec_errors import describe_json_error
from gpufn_core.errors import InvalidInput, UnsupportedMediaType
from gpufn_gateway.protocols.raw_bodies import is_json

STRUCTURED: Final = "application/cloudevents+json"
_BATCH: Final = "application/cloudevents-batch"
_HEADER: Final = "ce-"
_REQUIRED: Final = ("specversion", "id", "source", "type")
_ATTRIBUTE: Final = re.compile(r"[a-z0-9]{1,100}")
# Printable ASCII that a header's value need not encode.
_SAFE: Final = "".join(map(chr, range(0x21, 0x7F))).replace('"', "").replace("%", "")
RESULT_TYPE: Final = "dev.gpufn.result"


class Event(NamedTuple):
    """An event. `data` has the content type `content_type`, which is "" without data."""

    attributes: dict[str, str]
    content_type: str
    data: bytes
    is_structured: bool


def parse(headers: Mapping[str, str], body: bytes) -> Event:
    """Parse a request. `headers` have lower-case names. Raises InvalidInput, UnsupportedMediaType."""
    content_type = headers.get("content-type", "")
    kind = content_type.partition(";")[0].strip().lower()
    if kind.startswith(_BATCH):
        raise UnsupportedMediaType("Send one event per request: batches are not supported.")
    if kind.startswith("application/cloudevents") and kind != STRUCTURED:
        raise UnsupportedMediaType(f"Send a structured event as {STRUCTURED}.")
    if kind == STRUCTURED:
        return _structured(body)
    attributes = {
        name.removeprefix(_HEADER): unquote(value) for name, value in headers.items() if name.startswith(_HEADER)
    }
    _check(attributes)
    return Event(attributes, content_type if body else "", body, is_structured=False)


def _structured(body: bytes) -> Event:
    try:
        fields = msgspec.json.decode(body, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidInput(f"the event is not a JSON object: {describe_json_error(error, body)}") from None
    data, encoded = fields.pop("data", None), fields.pop("data_base64", None)
    content_type = fields.pop("datacontenttype", None) or media.JSON
    if not isinstance(content_type, str):
        raise InvalidInput("datacontenttype must be a text", field="datacontenttype")
    for name, value in fields.items():
        if not isinstance(value, (str, int, bool)):
            raise InvalidInput(f"{name[:100]} must be a text, a number, or true or false", field=name[:100])
    attributes = {name: _text(value) for name, value in fields.items()}
    _check(attributes)
    if encoded is not None:
        try:
            raw = base64.b64decode(encoded, validate=True)
        except (binascii.Error, TypeError, ValueError):
            raise InvalidInput("data_base64 must be base64", field="data_base64") from None
    elif data is None:
        return Event(attributes, "", b"", is_structured=True)
    else:
        raw = data.encode() if isinstance(data, str) and not is_json(content_type) else msgspec.json.encode(data)
    return Event(attributes, content_type, raw, is_structured=True)


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _check(attributes: Mapping[str, str]) -> None:
    for name in _REQUIRED:
        if not attributes.get(name):
            raise InvalidInput(f"the event has no {name}", field=name)
    if attributes["specversion"] != "1.0":
        raise InvalidInput(f"specversion must be 1.0, not {attributes['specversion'][:40]!r}", field="specversion")
    if wrong := next((name for name in attributes if _ATTRIBUTE.fullmatch(name) is None), None):
        raise InvalidInput(f"{wrong[:100]!r} cannot be an attribute: use a to z and 0 to 9", field=wrong[:100])


def as_object(event: Event) -> dict[str, Any]:
    """Return an event as the object of structured mode."""
    fields: dict[str, Any] = dict(event.attributes)
    if event.content_type:
        fields["datacontenttype"] = event.content_type
    elif not event.data:
        return fields
    if is_json(event.content_type):
        return {**fields, "data": msgspec.Raw(event.data)}
    return {**fields, "data_base64": base64.b64encode(event.data).decode()}


def encode(event: Event) -> tuple[dict[str, str], bytes]:
    """Return the headers and the body of an event, in its mode."""
    if event.is_structured:
        return {"content-type": f"{STRUCTURED}; charset=utf-8"}, msgspec.json.encode(as_object(event))
    headers = {f"{_HEADER}{name}": quote(value, safe=_SAFE) for name, value in event.attributes.items()}
    return headers | ({"content-type": event.content_type} if event.content_type else {}), event.data


def result(
    function: str, invocation: str, at: float, content_type: str, data: bytes, *, type_: str, is_structured: bool
) -> Event:
    """Return the event for the end of a call. `at` is in UNIX seconds."""
    time = datetime.datetime.fromtimestamp(at, datetime.UTC).isoformat().replace("+00:00", "Z")
    source = f"/cloudevents/{function}"
    attributes = {"specversion": "1.0", "id": invocation, "source": source, "type": type_, "time": time}
    return Event(attributes, content_type, data, is_structured)
