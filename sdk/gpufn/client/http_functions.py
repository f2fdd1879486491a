"""Functions over HTTP: the part of `Client` that shows, changes and deletes functions and their revisions."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from gpufn.client.http import JSON_BODY, Requests
from gpufn.client.responses import decoded
from gpufn.client.streams import lines_of
from gpufn.client.views import (
    Building,
    Calls,
    Functions,
    FunctionView,
    InvocationView,
    RevisionProgress,
    Revisions,
    RevisionView,
    Usages,
    UsageView,
    WhyView,
)
from gpufn_core.domain.invocation import InvocationState
from gpufn_core.domain.revision import Source
from gpufn_core.encoding.urls import segment
from gpufn_core.errors import PayloadTooLarge
from gpufn_core.ids import Digest
from gpufn_core.protocol.messages import LogLine
from gpufn_core.spec.function_spec import FunctionSpec


class FunctionRequests(Requests):
    """The endpoints of functions, revisions and bundles."""

    def functions(self) -> list[FunctionView]:
        """Every deployed function, by name."""
        return self._json(Functions, "GET", "/v1/functions").functions

    def function(self, name: str, *, env_values: bool = False) -> FunctionView:
        """One function. `env` lists the names of its environment variables; `env_values` requests their values in
        `spec["env"]`, which needs the scope deploy. Raises FunctionNotFound, Forbidden."""
        query = "?env=values" if env_values else ""
        return self._json(FunctionView, "GET", f"/v1/functions/{segment(name)}{query}")

    def create_revision(
        self,
        spec: FunctionSpec,
        bundle: Digest,
        *,
        check: bool = True,
        source: Source | None = None,
        replace: bool = False,
        code: str = "",
    ) -> FunctionView | Building:
        """Deploy a spec whose bundle and models have been uploaded; `deploy` does all. Building: one with models."""
        how = {"check": check, "source": source, "replace": replace, "code": code}
        body = msgspec.json.encode({"spec": spec, "bundle": bundle, **how})
        response = self._request("POST", "/v1/functions", content=body, headers=JSON_BODY)
        if response.status_code == 202:
            return decoded(Building, response.content)
        return decoded(FunctionView, response.content)

    def delete(self, name: str) -> None:
        """Queued calls are cancelled, running ones finish."""
        self._request("DELETE", f"/v1/functions/{segment(name)}")

    def revisions(self, name: str) -> list[RevisionView]:
        """Every revision, the oldest first."""
        return self._json(Revisions, "GET", f"/v1/functions/{segment(name)}/revisions").revisions

    def revision(self, name: str, number: int) -> RevisionProgress:
        """One revision, and how far the builds of its models are."""
        return self._json(RevisionProgress, "GET", f"/v1/functions/{segment(name)}/revisions/{number}")

    def rollback(self, name: str, revision: int | None = None) -> FunctionView:
        """Make an earlier revision the active one; None: the one before it."""
        body = msgspec.json.encode({} if revision is None else {"revision": revision})
        path = f"/v1/functions/{segment(name)}/rollback"
        return self._json(FunctionView, "POST", path, content=body, headers=JSON_BODY)

    def scale(self, name: str, min_workers: int | None, max_workers: int | None) -> FunctionView:
        """Take the place of the spec's bounds; None: back to the spec's."""
        body = msgspec.json.encode({"min_workers": min_workers, "max_workers": max_workers})
        return self._json(FunctionView, "POST", f"/v1/functions/{segment(name)}/scale", content=body, headers=JSON_BODY)

    def why(self, name: str) -> WhyView:
        """Why it has the workers it has, and why its calls wait."""
        return self._json(WhyView, "GET", f"/v1/functions/{segment(name)}/why")

    def logs(self, name: str, *, tail: int = 100, follow: bool = False) -> Iterator[LogLine]:
        """The last lines that its workers wrote; with `follow` also those that come."""
        params = {"tail": str(tail), "follow": "true" if follow else "false"}
        with self._stream("GET", f"/v1/functions/{segment(name)}/logs", params=params) as response:
            for line in lines_of(self._chunks(response)):
                if line.strip():
                    yield decoded(LogLine, line)

    def calls(
        self,
        name: str | None = None,
        *,
        function: str | None = None,
        state: InvocationState | None = None,
        since: float | None = None,
        limit: int = 20,
    ) -> list[InvocationView]:
        """Submitted calls of a function, or of all, the newest first. `since` in unix seconds.

        `name` raises FunctionNotFound; `function` finds the calls of a deleted one as well.
        """
        wanted = {"function": function, "state": state, "since": since, "limit": limit}
        params = {option: str(value) for option, value in wanted.items() if value is not None}
        path = "/v1/calls" if name is None else f"/v1/functions/{segment(name)}/calls"
        return self._json(Calls, "GET", path, params=params).calls

    def usage(
        self, *, function: str | None = None, key: str | None = None, since: str | None = None, until: str | None = None
    ) -> list[UsageView]:
        """What calls took, per day, function and API key (``platform``: none). `since` and `until` are days of UTC, as
        ``2026-11-21``; without them the last seven. `function` may have been deleted since.

        Raises FunctionNotFound.
        """
        wanted = {"function": function, "key": key, "since": since, "until": until}
        params = {option: value for option, value in wanted.items() if value is not None}
        return self._json(Usages, "GET", "/v1/usage", params=params).usage

    def has_bundle(self, digest: Digest) -> bool:
        """Whether it has been uploaded."""
        return self._exists(f"/v1/bundles/{segment(digest)}")

    def put_bundle(self, digest: Digest, data: bytes) -> bool:
        """Upload unless it is there; False when it was."""
        if self.has_bundle(digest):
            return False
        headers = {"content-type": "application/zip"}
        try:
            self._request("PUT", f"/v1/bundles/{segment(digest)}", content=data, headers=headers)
        except PayloadTooLarge as error:
            mib = len(data) / (1 << 20)
            raise PayloadTooLarge(
                f"the bundle of {mib:.1f} MiB is larger than the gateway takes: leave large files out, and read them "
                "in the worker from a disk or an address"
            ) from error
        return True
