"""Function endpoints of `Client`: show, change and delete functions and their revisions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from gpufn.client.http import JSON_BODY, MANAGE_TIMEOUT_S, Requests
from gpufn.client.responses import decode
from gpufn.client.streams import lines_of
from gpufn.client.views.calls import CallsView, InvocationView
from gpufn.client.views.figures import AdviceView, UsageView
from gpufn.client.views.functions import (
    ActiveRevision,
    AppView,
    BuildingRevision,
    FunctionView,
    FunctionViews,
    RevisionProgress,
    RevisionView,
    WhyView,
)
from gpufn_core.domain.invocation import InvocationState
from gpufn_core.domain.profiles.stacks import Stack, parse
from gpufn_core.domain.revision import Lease, Source
from gpufn_core.encoding.urls import segment
from gpufn_core.errors import PayloadTooLarge
from gpufn_core.ids import Digest
from gpufn_core.protocol.messages import LogLine
from gpufn_core.protocol.profiles import GPU_EXTRA_S
from gpufn_core.signing.statement import DeploySignature
from gpufn_core.spec.function_spec import FunctionSpec
from gpufn_core.spec.naming.names import DEFAULT
from gpufn_core.spec.units import format_bytes


class FunctionRequests(Requests):
    """Function, revision and bundle endpoints."""

    def functions(self) -> list[FunctionView]:
        """List the deployed functions by name."""
        return FunctionViews(self._member(list[FunctionView], "functions", "GET", "/v1/functions"))

    def function(self, name: str, *, env_values: bool = False) -> FunctionView:
        """Return one function. Raises FunctionNotFound, Forbidden.

        Its `env` lists the names of its environment variables. `env_values` also requests their values, in
        `spec["env"]`; that needs the scope deploy.
        """
        query = "?env=values" if env_values else ""
        return self._json(FunctionView, "GET", f"{self._function_url(name)}{query}")

    def create_revision(
        self,
        spec: FunctionSpec,
        bundle: Digest,
        *,
        check: bool = True,
        source: Source | None = None,
        replace: bool = False,
        code: str = "",
        deploy_id: str = "",
        signature: DeploySignature | None = None,
        lease: Lease | None = None,
        traffic: int | None = None,
    ) -> FunctionView | BuildingRevision:
        """Create a revision from a spec whose bundle and models are uploaded. `deploy` does all steps.

        `traffic` is the percentage of the calls for it; the serving revision stays active.
        Return BuildingRevision if the gateway builds engines for its models first.
        """
        options: dict[str, Any] = {"check": check, "source": source, "replace": replace, "code": code}
        options["deploy_id"] = deploy_id
        if signature is not None:  # a gateway of an earlier release knows no such field
            options["signature"] = signature
        if lease is not None:
            options["lease"] = {"id": lease.id, "ttl_s": lease.ttl_s}
        if traffic is not None:
            options["traffic"] = traffic
        body = msgspec.json.encode({"spec": spec, "bundle": bundle, **options})
        response = self._request("POST", "/v1/functions", content=body, headers=JSON_BODY)
        if response.status_code == 202:
            return decode(BuildingRevision, response.content)
        return decode(FunctionView, response.content)

    def delete(self, name: str, *, lease: str = "") -> None:
        """Delete a function. Its queued calls are cancelled; running calls finish. With `lease`, raises Conflict unless
        the function is temporary and has this lease."""
        params = {"lease": lease} if lease else {}
        self._request("DELETE", self._function_url(name), params=params)

    def renew(self, name: str, lease: Lease) -> FunctionView:
        """Renew the lease of a temporary function. Raises FunctionNotFound; Conflict if the function is permanent now,
        or has another lease."""
        body = msgspec.json.encode({"id": lease.id, "ttl_s": lease.ttl_s})
        return self._json(FunctionView, "POST", f"{self._function_url(name)}/lease", content=body, headers=JSON_BODY)

    def revisions(self, name: str) -> list[RevisionView]:
        """List a function's revisions, oldest first."""
        return self._member(list[RevisionView], "revisions", "GET", f"{self._function_url(name)}/revisions")

    def revision(self, name: str, number: int, *, env_values: bool = False) -> RevisionProgress:
        """Return one revision and the progress of its builds. `env_values` also requests the values of its environment
        variables, in `spec["env"]`; that needs the scope deploy."""
        query = "?env=values" if env_values else ""
        return self._json(RevisionProgress, "GET", f"{self._function_url(name)}/revisions/{number}{query}")

    def bundle(self, name: str, number: int) -> bytes:
        """Return the code of a revision, a zip archive. Needs the scope deploy."""
        return self._request("GET", f"{self._function_url(name)}/revisions/{number}/bundle").content

    def rollback(self, name: str, revision: int | None = None) -> FunctionView:
        """Make an earlier revision active (default: the one before the active revision)."""
        body = msgspec.json.encode({} if revision is None else {"revision": revision})
        path = f"{self._function_url(name)}/rollback"
        return self._json(FunctionView, "POST", path, content=body, headers=JSON_BODY)

    def apps(self) -> list[AppView]:
        """List the apps of all environments."""
        return self._member(list[AppView], "apps", "GET", "/v1/apps")

    def rollback_app(self, app: str, environment: str = DEFAULT) -> list[ActiveRevision]:
        """Undo the last deploy of an app. Return the functions that returned to an earlier revision.

        Raises FunctionNotFound for an unknown app, RevisionNotFound if there is nothing to go back to.
        """
        path = f"/v1/apps/{segment(environment)}/{segment(app)}/rollback"
        return self._member(list[ActiveRevision], "functions", "POST", path)

    def scale(self, name: str, min_workers: int | None, max_workers: int | None) -> FunctionView:
        """Override the spec's minimum and maximum number of workers. None restores the spec's own value."""
        body = msgspec.json.encode({"min_workers": min_workers, "max_workers": max_workers})
        return self._json(FunctionView, "POST", f"{self._function_url(name)}/scale", content=body, headers=JSON_BODY)

    def why(self, name: str) -> WhyView:
        """Explain a function's number of workers, and why its calls wait."""
        return self._json(WhyView, "GET", f"{self._function_url(name)}/why")

    def advice(self, name: str) -> AdviceView:
        """Compare the options of a function with its usage in the history."""
        return self._json(AdviceView, "GET", f"{self._function_url(name)}/advice")

    def logs(self, name: str, *, tail: int = 100, follow: bool = False) -> Iterator[LogLine]:
        """Yield the last `tail` log lines of a function's workers; with `follow`, also new lines as they arrive."""
        params = {"tail": str(tail), "follow": "true" if follow else "false"}
        with self._stream("GET", f"{self._function_url(name)}/logs", params=params) as response:
            for line in lines_of(self._chunks(response)):
                if line.strip():
                    yield decode(LogLine, line)

    def calls(
        self,
        name: str | None = None,
        *,
        function: str | None = None,
        state: InvocationState | None = None,
        since: float | None = None,
        key: str | None = None,
        limit: int = 20,
    ) -> list[InvocationView]:
        """List submitted calls, of one function or of all, newest first. `since` is in unix seconds, `key` the id of
        the API key that made them. A rare state or key may take a while: the gateway looks at every call.

        An unknown `name` raises FunctionNotFound; `function` also finds the calls of a deleted function.
        """
        function = None if function is None else self._function_path(function)
        filters = {"function": function, "state": state, "since": since, "key": key}
        params = {option: str(value) for option, value in filters.items() if value is not None}
        path = "/v1/calls" if name is None else f"{self._function_url(name)}/calls"
        found: list[InvocationView] = []
        while len(found) < limit:
            page = self._json(CallsView, "GET", path, params=params | {"limit": str(limit - len(found))})
            found += page.calls
            if page.next is None:
                break
            params["before"] = page.next
        return found

    def profile(
        self,
        name: str,
        *,
        seconds: float = 10.0,
        worker: str = "",
        call: str = "",
        slower_than_s: float = 0.0,
        wait_s: float = 60.0,
        idle: bool = False,
        memory: bool = False,
    ) -> tuple[str, list[Stack]]:
        """Profile a worker of a function: `worker`, the worker that runs `call`, the first worker whose call runs for
        `slower_than_s` in the next `wait_s`, or a busy worker. Return its id and the stacks, with 100 samples per
        second of each running thread; with `idle`, also of waiting threads. With `memory` the numbers of the stacks are
        the bytes that they allocated and kept.

        Raises CapacityError without a worker, Conflict if it cannot be profiled, WorkerLost if it ends meanwhile,
        InvocationNotFound without such a call.
        """
        which = {"worker": worker, "call": call, "slower_than_s": slower_than_s, "wait_s": wait_s}
        fields = {"kind": "memory" if memory else "cpu", "idle": idle, "format": "folded"}
        profiled, profile = self._profile(name, seconds, 0.0, which | fields)
        return profiled, parse(profile.decode())

    def gpu_profile(
        self,
        name: str,
        *,
        seconds: float = 2.0,
        worker: str = "",
        call: str = "",
        slower_than_s: float = 0.0,
        wait_s: float = 60.0,
    ) -> tuple[str, bytes]:
        """Record the GPU and the operators of torch in a worker, which is chosen as for `profile`. Return its id and
        Chrome's JSON, compressed by gzip. Raises the exceptions of `profile`."""
        which = {"worker": worker, "call": call, "slower_than_s": slower_than_s, "wait_s": wait_s}
        return self._profile(name, seconds, GPU_EXTRA_S, which | {"kind": "gpu"})

    def _profile(self, name: str, seconds: float, extra_s: float, fields: dict[str, Any]) -> tuple[str, bytes]:
        """Return the id of the worker, and its profile."""
        waits_s = fields["wait_s"] if fields["slower_than_s"] else 0.0
        response = self._request(
            "POST",
            f"{self._function_url(name)}/profile",
            content=msgspec.json.encode({"seconds": seconds, **fields}),
            headers=JSON_BODY,
            timeout=seconds + waits_s + extra_s + MANAGE_TIMEOUT_S,
        )
        return response.headers.get("x-gpufn-worker", ""), response.content

    def usage(
        self, *, function: str | None = None, key: str | None = None, since: str | None = None, until: str | None = None
    ) -> list[UsageView]:
        """Return the resources that calls used, per day, function and API key (``platform`` for calls without a key).

        `since` and `until` are UTC days such as ``2026-11-21`` (default: the last seven days). `function` may be a
        deleted function. Raises FunctionNotFound.
        """
        function = None if function is None else self._function_path(function)
        filters = {"function": function, "key": key, "since": since, "until": until}
        params = {option: value for option, value in filters.items() if value is not None}
        return self._member(list[UsageView], "usage", "GET", "/v1/usage", params=params)

    def has_bundle(self, digest: Digest) -> bool:
        """Return whether the gateway has a bundle."""
        return self._exists(f"/v1/bundles/{segment(digest)}")

    def put_bundle(self, digest: Digest, data: bytes) -> bool:
        """Upload a bundle unless the gateway has it. Return False if it had."""
        if self.has_bundle(digest):
            return False
        headers = {"content-type": "application/zip"}
        try:
            self._request("PUT", f"/v1/bundles/{segment(digest)}", content=data, headers=headers)
        except PayloadTooLarge as error:
            raise PayloadTooLarge(
                f"the bundle of {format_bytes(len(data))} exceeds the gateway's size limit: leave large files out, "
                "and read them in the worker from a disk or a URL"
            ) from error
        return True
