"""Views of a map. Pure."""

from __future__ import annotations

from typing import Any

from gpufn_core.protocol.records import MapEntry


def accepted_view(entry: MapEntry) -> dict[str, Any]:
    """Return the response to a chunk."""
    return {"id": entry.id, "accepted": entry.accepted, "state": _state(entry, 0), "links": links(entry.id)}


def status(entry: MapEntry, ended: int, failed: int = 0) -> dict[str, Any]:
    """Return the status of a map with `ended` ended items, of which `failed` have a dead letter. An ended map stays
    ended when its records expire."""
    ended = entry.accepted if entry.is_ended else min(ended, entry.accepted)
    return {
        "id": entry.id,
        "function": f"{entry.function}.{entry.method}" if entry.method else entry.function,
        "revision": entry.revision,
        "state": _state(entry, ended),
        "submitted_at": entry.submitted_at,
        "accepted": entry.accepted,
        "ended": ended,
        "failed": failed,
        "links": links(entry.id),
    }


def links(map_id: str) -> dict[str, str]:
    url = f"/v1/maps/{map_id}"
    return {"self": url, "outcomes": f"{url}/outcomes"}


def _state(entry: MapEntry, ended: int) -> str:
    if entry.is_cancelled:
        return "cancelled"
    if not entry.is_closed:
        return "open"
    return "ended" if ended == entry.accepted else "running"
