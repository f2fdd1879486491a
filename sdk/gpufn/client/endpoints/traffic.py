"""The split of a function's calls between its revisions: endpoints of `Client`, and their responses."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import msgspec

from gpufn.client.http import JSON_BODY, Requests
from gpufn_core.domain.traffic import Difference, HeaderRule, Mirror, Returned
from gpufn_core.protocol.reports import RevisionStatus


class ComparedCalls(msgspec.Struct, frozen=True, kw_only=True):
    """Mirrored calls by the comparison of their results, and the median run times of the calls and of their copies."""

    revision: int
    equal: int = 0
    different: int = 0
    failed: int = 0
    skipped: int = 0
    p50_s: float | None = None
    copy_p50_s: float | None = None


class TrafficView(msgspec.Struct, frozen=True, kw_only=True):
    """How the calls of a function are divided. `weights` are in percent. `set_at` is None without a split: then the
    serving revision gets all calls. `returned` is the last automatic return. The counts lag up to a second behind."""

    function: str
    active: int
    serving: int
    weights: dict[int, int]
    set_at: float | None = None
    headers: tuple[HeaderRule, ...] = ()
    mirror: Mirror | None = None
    return_if: tuple[str, ...] = ()
    window_s: float | None = None
    min_calls: int | None = None
    returned: Returned | None = None
    revisions: tuple[RevisionStatus, ...] = ()
    compared: ComparedCalls | None = None


class TrafficRequests(Requests):
    """Traffic endpoints."""

    def traffic(self, name: str) -> TrafficView:
        """Show how the calls of a function are divided between its revisions."""
        return self._json(TrafficView, "GET", f"{self._function_url(name)}/traffic")

    def set_traffic(
        self,
        name: str,
        weights: Mapping[int, int] | None = None,
        *,
        headers: Sequence[HeaderRule] = (),
        mirror: Mirror | None = None,
        return_if: Collection[str] = (),
        window_s: float | None = None,
        min_calls: int | None = None,
    ) -> TrafficView:
        """Divide the calls of a function between its revisions; `weights` are in percent (default: 100 for the serving
        revision). `return_if` has rules such as ``errors>2%`` and ``p99>1.5x``.

        Raises InvalidInput, RevisionNotFound, Conflict while another revision is about to serve.
        """
        options: dict[str, Any] = {"window_s": window_s, "min_calls": min_calls}
        body: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
        body |= {"weights": weights or {}, "headers": headers, "mirror": mirror, "return_if": list(return_if)}
        path = f"{self._function_url(name)}/traffic"
        return self._json(TrafficView, "PUT", path, content=msgspec.json.encode(body), headers=JSON_BODY)

    def clear_traffic(self, name: str) -> TrafficView:
        """End the split: all calls go to the serving revision."""
        return self._json(TrafficView, "DELETE", f"{self._function_url(name)}/traffic")

    def traffic_differences(self, name: str) -> list[Difference]:
        """List the last mirrored calls whose copies ended otherwise, oldest first. Needs the scope deploy."""
        path = f"{self._function_url(name)}/differences"
        return self._member(list[Difference], "differences", "GET", path)
