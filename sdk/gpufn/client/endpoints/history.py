"""History endpoints of `Client`: series, events, traces and costs."""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import quote

from gpufn.client.http import Requests
from gpufn.client.views.figures import CostsView, EventsView, HistoryView
from gpufn.client.views.traces import TracesView, TraceView


class HistoryRequests(Requests):
    def costs(
        self,
        *,
        by: Sequence[str] = ("function",),
        since: str | None = None,
        until: str | None = None,
        share_unused: bool = False,
    ) -> CostsView:
        """Return costs by columns: day, team, app, function, key. `since` and `until` are UTC days (default: the last
        seven days)."""
        params = {"by": ",".join(by), "share_unused": str(share_unused).lower()}
        params |= {name: day for name, day in (("since", since), ("until", until)) if day is not None}
        return self._json(CostsView, "GET", "/v1/costs", params=params)

    def costs_csv(self, *, since: str | None = None, until: str | None = None, share_unused: bool = False) -> str:
        """Return costs by day, team, app, function and key as CSV with the columns of FOCUS 1.2."""
        params = {"format": "focus", "share_unused": str(share_unused).lower()}
        params |= {name: day for name, day in (("since", since), ("until", until)) if day is not None}
        return self._request("GET", "/v1/costs", params=params).text

    def history(
        self,
        *subjects: str,
        series: Sequence[str] = (),
        since: float | None = None,
        until: float | None = None,
        step_s: float | None = None,
    ) -> HistoryView:
        """Return series of subjects: ``function:NAME``, ``function:NAME@REVISION``, ``node:NAME``, ``gpu:UUID`` or
        ``overview``. Times are in unix seconds; the default is the last hour.
        """
        params: list[tuple[str, str]] = [("subject", subject) for subject in subjects]
        params += [("series", ",".join(series))] if series else []
        filters = {"from": since, "to": until, "step": step_s}
        params += [(name, f"{value:.3f}") for name, value in filters.items() if value is not None]
        return self._json(HistoryView, "GET", "/v1/history", params=params)

    def events(
        self,
        *,
        subject: str | None = None,
        kinds: Sequence[str] = (),
        since: float | None = None,
        before: int | None = None,
        limit: int = 100,
    ) -> EventsView:
        """Return events, the newest first. `before` is the `next` of the page before."""
        filters = {"subject": subject, "kind": ",".join(kinds) or None, "from": since, "before": before, "limit": limit}
        params = {name: str(value) for name, value in filters.items() if value is not None}
        return self._json(EventsView, "GET", "/v1/events", params=params)

    def traces(self, function: str | None = None, *, limit: int = 100) -> TracesView:
        """Return the traces that the gateway keeps, newest first: of a function, or of all."""
        params = {"limit": str(limit)} | ({} if function is None else {"function": function})
        return self._json(TracesView, "GET", "/v1/traces", params=params)

    def trace(self, id: str) -> TraceView:  # noqa: A002
        """Return the spans of a trace, by its id or by the id of a call in it."""
        return self._json(TraceView, "GET", f"/v1/traces/{quote(id, safe='')}")
