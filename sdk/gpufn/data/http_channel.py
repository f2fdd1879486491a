"""Operations on queues and dicts outside of workers: requests to the gateway."""

from __future__ import annotations

from typing import Any

import msgspec

from gpufn.client.http import Requests
from gpufn_core.encoding import media
from gpufn_core.encoding.urls import segment
from gpufn_core.errors import Conflict, DataNotFound, InvalidInput
from gpufn_core.protocol import codec
from gpufn_core.protocol.data import (
    CountItems,
    GetEntry,
    GetItem,
    GetValue,
    ItemReply,
    ListKeys,
    Operation,
    PutItem,
    PutValue,
    QueueOperation,
    RemoveEntry,
    SetEntry,
    SettleItem,
    StoredValue,
)

_WAIT_MARGIN_S = 10.0


class HttpChannel:
    """The `gpufn.data.channel.Channel` of a program."""

    def __init__(self, client: Requests) -> None:
        self._client = client

    def execute(self, operation: Operation, value: bytes = b"") -> tuple[str, bytes]:
        match operation:
            case PutItem() | GetItem() | SettleItem() | CountItems():
                return "", self._on_queue(operation, value)
            case PutValue() | GetValue():
                return "", self._on_value(operation, value)
            case GetEntry() | SetEntry() | RemoveEntry() | ListKeys():
                return self._on_dict(operation, value)
        raise InvalidInput("only a worker commits with volume.commit(): elsewhere, use `gpufn volume put`")

    def _on_queue(self, operation: QueueOperation, value: bytes) -> bytes:
        match operation:
            case PutItem(name, content_type, id_, ttl_s, max_items):
                params = _given(ttl=ttl_s, max_items=max_items, id=id_)
                self._send("POST", f"queues/{self._path(name)}/items", params, content_type, value)
                return b""
            case GetItem():
                return self._lease(operation)
            case SettleItem(name, lease, is_done):
                verb = "ack" if is_done else "release"
                self._send("POST", f"queues/{self._path(name)}/{verb}", {"lease": lease})
                return b""
            case CountItems(name):
                response = self._send("GET", f"queues/{self._path(name)}", {})
                return codec.encode(msgspec.json.decode(response.content)["items"])

    def _lease(self, get: GetItem) -> bytes:
        params = _given(wait=get.wait_s, lease=get.lease_s, max_deliveries=get.max_deliveries)
        path = f"queues/{self._path(get.name)}/lease"
        response = self._send("POST", path, params, timeout=get.wait_s + _WAIT_MARGIN_S)
        if response.status_code == 204:
            return b""
        headers = response.headers
        header = ItemReply(headers["x-gpufn-lease"], headers["content-type"], int(headers["x-gpufn-deliveries"]))
        return codec.pack(header, response.content)

    def _on_value(self, operation: PutValue | GetValue, value: bytes) -> bytes:
        if isinstance(operation, GetValue):
            content: bytes = self._send("GET", f"values/{segment(operation.name)}", {}).content
            return content
        response = self._send("POST", "values", _given(ttl=operation.ttl_s), media.BYTES, value)
        return codec.encode(msgspec.json.decode(response.content, type=StoredValue))

    def _on_dict(self, operation: GetEntry | SetEntry | RemoveEntry | ListKeys, value: bytes) -> tuple[str, bytes]:
        path = f"dicts/{self._path(operation.name)}"
        match operation:
            case GetEntry(_, key):
                try:
                    response = self._send("GET", f"{path}/entry", {"key": key})
                except DataNotFound:
                    return "", b""
                return response.headers["content-type"], response.content
            case SetEntry(_, key, content_type, ttl_s, only_new):
                params = _given(key=key, ttl=ttl_s) | ({"only_new": "true"} if only_new else {})
                return "", self._succeeds("PUT", f"{path}/entry", params, content_type, value)
            case RemoveEntry(_, key):
                return "", self._succeeds("DELETE", f"{path}/entry", {"key": key})
            case ListKeys():
                response = self._send("GET", f"{path}/keys", {})
                return "", codec.encode(msgspec.json.decode(response.content)["keys"])

    def _succeeds(self, *request: Any) -> bytes:
        """Return, encoded, whether the entry was there to delete, or was absent as `only_new` requires."""
        try:
            self._send(*request)
        except (Conflict, DataNotFound):
            return codec.encode(False)
        return codec.encode(True)

    def _path(self, name: str) -> str:
        return self._client._function_path(name)

    def _send(
        self, method: str, path: str, params: dict[str, str], content_type: str = "", value: bytes = b"", **options: Any
    ) -> Any:
        if content_type:
            options |= {"content": value, "headers": {"content-type": content_type}}
        return self._client._request(method, f"/v1/{path}", params=params, **options)


def _given(**params: Any) -> dict[str, str]:
    return {name: f"{value:g}" if isinstance(value, float) else str(value) for name, value in params.items() if value}
