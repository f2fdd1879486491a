"""Map endpoints of `Client` and `HttpTransport`: send items, read outcomes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from gpufn.client.http import Requests
from gpufn.client.views.calls import MapView
from gpufn.maps.reader import ItemOutcome, parse_outcomes
from gpufn_core.encoding import media
from gpufn_core.encoding.urls import segment
from gpufn_core.spec.priority import priority_of

_CHUNK_TYPES = {media.JSON: media.LINES, media.PICKLED: media.PICKLED_CALLS}
_READ_TIMEOUT_S = 60.0  # the gateway sends something every 15 s


class MapRequests(Requests):
    """Map endpoints."""

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
        """Submit items of a map, starting at index `first`. The caller chooses the map's id.

        `last` closes the map. A retry with the same indexes submits no item twice. Each item is the arguments of a
        call, in JSON or the SDK's encoding.
        """
        is_json = content_type == media.JSON
        content = b"".join(
            part for item in items for part in ((item, b"\n") if is_json else (len(item).to_bytes(4, "big"), item))
        )
        headers = {"content-type": _CHUNK_TYPES.get(content_type, media.CALLS), "accept": accept}
        if priority is not None:
            headers["x-gpufn-priority"] = priority_of(priority).value
        path = f"{self._function_url(function)}/maps/{segment(map_id)}/items/{first}"
        params = {"last": "true"} if last else {}
        return self._json(MapView, "PUT", path, content=content, headers=headers, params=params)

    def outcomes_raw(self, map_id: str, after: str = "") -> Iterator[list[ItemOutcome]]:
        """Yield the outcomes of a map's items as they end, starting after the cursor `after`."""
        params = {"after": after} if after else {}
        headers = {"accept": media.OUTCOMES}
        path = f"/v1/maps/{segment(map_id)}/outcomes"
        with self._stream("GET", path, params=params, headers=headers, read_timeout_s=_READ_TIMEOUT_S) as response:
            yield from parse_outcomes(self._chunks(response))

    def map(self, id: str) -> MapView:  # noqa: A002
        """Return the progress of a map. Raises MapNotFound."""
        return self._json(MapView, "GET", f"/v1/maps/{segment(id)}")

    def maps(self, function: str | None = None, *, limit: int = 20) -> list[MapView]:
        """List the maps of one function or of all, newest first."""
        params = {"limit": str(limit)} | ({} if function is None else {"function": function})
        return self._member(list[MapView], "maps", "GET", "/v1/maps", params=params)

    def cancel_map(self, id: str) -> bool:  # noqa: A002
        """Cancel the items of a map that have not ended. Return False if all had ended."""
        return self._member(bool, "cancelled", "DELETE", f"/v1/maps/{segment(id)}")
