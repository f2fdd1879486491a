"""Maps over HTTP: the part of `Client` and of `HttpTransport` that sends their items and reads their ends."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from gpufn.client.http import Requests
from gpufn.client.views import MapCancellation, Maps, MapView
from gpufn.maps.reader import End, ends_of
from gpufn_core.encoding import media
from gpufn_core.encoding.urls import segment
from gpufn_core.spec.priority import priority_of

_CHUNKS = {media.JSON: media.LINES, media.PICKLED: media.PICKLED_CALLS}
_SILENT_S = 60.0  # a gateway says something every 15 s


class MapRequests(Requests):
    """The endpoints of maps."""

    def send_items(
        self,
        function: str,
        map_id: str,
        first: int,
        items: Sequence[bytes],
        *,
        content_type: str = media.JSON,
        accept: str = media.JSON,
        last: bool = False,
        priority: str | None = None,
    ) -> MapView:
        """Submit items `first` and following of a map whose id is your own; `last` closes it. Sent again, they are the
        same items. Each is the arguments of a call: JSON, or the SDK's own encoding."""
        lines = content_type == media.JSON
        content = b"".join(
            part for item in items for part in ((item, b"\n") if lines else (len(item).to_bytes(4, "big"), item))
        )
        headers = {"content-type": _CHUNKS.get(content_type, media.CALLS), "accept": accept}
        if priority is not None:
            headers["x-gpufn-priority"] = priority_of(priority).value
        path = f"/v1/functions/{segment(function)}/maps/{segment(map_id)}/items/{first}"
        params = {"last": "true"} if last else {}
        return self._json(MapView, "PUT", path, content=content, headers=headers, params=params)

    def outcomes_raw(self, map_id: str, after: str = "") -> Iterator[list[End]]:
        """How the items of a map ended, as they do; those behind the cursor `after`."""
        params = {"after": after} if after else {}
        headers = {"accept": media.OUTCOMES}
        path = f"/v1/maps/{segment(map_id)}/outcomes"
        with self._stream("GET", path, params=params, headers=headers, silent_s=_SILENT_S) as response:
            yield from ends_of(self._chunks(response))

    def map(self, id: str) -> MapView:  # noqa: A002
        """How far a map is. Raises MapNotFound."""
        return self._json(MapView, "GET", f"/v1/maps/{segment(id)}")

    def maps(self, function: str | None = None, *, limit: int = 20) -> list[MapView]:
        """The maps of a function, or of all, the newest first."""
        params = {"limit": str(limit)} | ({} if function is None else {"function": function})
        return self._json(Maps, "GET", "/v1/maps", params=params).maps

    def cancel_map(self, id: str) -> bool:  # noqa: A002
        """End those of its items that have not ended; False when all had."""
        return self._json(MapCancellation, "DELETE", f"/v1/maps/{segment(id)}").cancelled
