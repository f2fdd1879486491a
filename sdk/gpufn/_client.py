"""The gateway's HTTP interface (docs/http.md) from Python.

    Client    one method per endpoint; what it raises is from `gpufn.errors`

`_requests` sends (and says what is repeated), `_answers` and `_streams` read what comes back, `_http_maps` has the
endpoints of maps, and `_http_transport` brings `.remote` and its siblings here. A submitted call gets its id here, so
submitting is safe to repeat, too.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from gpufn import media, values
from gpufn._answers import answer_of, decoded
from gpufn._http_maps import MapRequests
from gpufn._requests import MANAGE_TIMEOUT_S
from gpufn._streams import events_of, items_of, lines_of
from gpufn._views import (
    AllReplayed,
    Answer,
    Building,
    Builds,
    BuildView,
    Calls,
    Cancellation,
    Collected,
    DeadLetters,
    DeadLetterView,
    Dropped,
    Engines,
    EngineView,
    Functions,
    FunctionView,
    InvocationView,
    Keys,
    KeyView,
    Models,
    ModelView,
    Nodes,
    Replayed,
    RevisionProgress,
    Revisions,
    RevisionView,
    Schedules,
    ScheduleView,
    Usages,
    UsageView,
    WebhookSecret,
    WhyView,
)
from gpufn.errors import (
    PayloadTooLarge,
)
from gpufn.ids import Digest, new_invocation_id
from gpufn.invocation import InvocationState
from gpufn.model import ModelSpec
from gpufn.priority import Priority
from gpufn.protocol.messages import KeyLimits, LogLine
from gpufn.schedule import Schedule
from gpufn.spec import FunctionSpec

if TYPE_CHECKING:
    from gpufn._bundle import AnyFunction

T = TypeVar("T")

EVENTS = "text/event-stream"

_LONGEST_WAIT_S = 30.0  # of one request for a result
_CHUNK_BYTES = 1 << 20  # of an upload
_JSON = {"content-type": values.JSON}


class Client(MapRequests):
    """One gateway. Without arguments: GPUFN_URL and GPUFN_API_KEY, else the platform on this machine.

    >>> with Client("http://127.0.0.1:1") as client:
    ...     client.functions()
    Traceback (most recent call last):
        ...
    gpufn.errors.GatewayUnavailable: no gateway answers at http://127.0.0.1:1: is `gpufn up` running?
    """

    # Invoke

    def invoke(self, function: str, /, **arguments: Any) -> Any:
        """Call a deployed function (`name`, or `name.method`) and wait for its result."""
        answer = self.invoke_raw(function, values.encode_call((), arguments), values.NATIVE, accept=values.NATIVE)
        return values.decode_value(answer.content_type, answer.body, allow_pickle=True)

    def invoke_raw(
        self,
        function: str,
        body: bytes,
        content_type: str = values.JSON,
        *,
        accept: str = values.JSON,
        timeout_s: float | None = None,
        priority: Priority | None = None,
    ) -> Answer:
        """As `invoke`, with bytes in and out. `priority` None: the function's own class."""
        headers = _call_headers(content_type, accept, timeout_s, priority)
        path = f"/v1/functions/{function}/invoke"
        response = self._request("POST", path, content=body, headers=headers, timeout=self._endless)
        return answer_of(response)

    def stream_raw(
        self,
        function: str,
        body: bytes,
        content_type: str = values.JSON,
        *,
        timeout_s: float | None = None,
        priority: Priority | None = None,
    ) -> Iterator[tuple[str, bytes]]:
        """The items of a generator, content type and bytes, in the SDK's encoding. Closing the iterator cancels."""
        headers = _call_headers(content_type, media.ITEMS, timeout_s, priority)
        path = f"/v1/functions/{function}/invoke"
        with self._stream("POST", path, content=body, headers=headers) as response:
            yield from items_of(self._chunks(response))

    def stream_json(
        self,
        function: str,
        body: bytes,
        content_type: str = values.JSON,
        *,
        timeout_s: float | None = None,
        priority: Priority | None = None,
    ) -> Iterator[Any]:
        """The items of a generator as JSON values, by server-sent events."""
        headers = _call_headers(content_type, EVENTS, timeout_s, priority)
        path = f"/v1/functions/{function}/invoke"
        with self._stream("POST", path, content=body, headers=headers) as response:
            yield from events_of(lines_of(self._chunks(response)))

    def submit(
        self,
        function: str,
        body: bytes,
        content_type: str = values.JSON,
        *,
        invocation: str | None = None,
        accept: str = values.NATIVE,
        webhook: str | None = None,
        priority: Priority | None = None,
    ) -> InvocationView:
        """Queue a call and return; its result is kept as `accept`. The same `invocation` id twice is one call.

        Its end is told to `webhook`, an address, in place of the function's; `gpufn.webhooks.verify` checks what comes.
        """
        path = f"/v1/functions/{function}/invocations/{invocation or new_invocation_id()}"
        headers = _call_headers(content_type, accept, None, priority)
        if webhook:
            headers["x-gpufn-webhook"] = webhook
        return self._json(InvocationView, "PUT", path, content=body, headers=headers)

    def invocation(self, id: str) -> InvocationView:  # noqa: A002
        """How a submitted call stands."""
        return self._json(InvocationView, "GET", f"/v1/invocations/{id}")

    def result_raw(self, id: str, *, timeout_s: float | None = None, accept: str = values.NATIVE) -> Answer:  # noqa: A002
        """Wait for the end of a submitted call. Raises its error, or TimeoutError while it still runs."""
        give_up = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            wait = _LONGEST_WAIT_S if give_up is None else max(min(give_up - time.monotonic(), _LONGEST_WAIT_S), 0.0)
            response = self._request(
                "GET", f"/v1/invocations/{id}/result", params={"wait": f"{wait:.3f}"}, headers={"accept": accept}
            )
            if response.status_code != 202:
                return answer_of(response)
            if give_up is not None and time.monotonic() >= give_up:
                raise TimeoutError(f"invocation {id} has not ended after {timeout_s:g} s")

    def cancel(self, id: str) -> bool:  # noqa: A002
        """False when it had ended already."""
        return self._json(Cancellation, "DELETE", f"/v1/invocations/{id}").cancelled

    # Functions

    def functions(self) -> list[FunctionView]:
        """Every deployed function, by name."""
        return self._json(Functions, "GET", "/v1/functions").functions

    def function(self, name: str) -> FunctionView:
        """One function. Raises FunctionNotFound."""
        return self._json(FunctionView, "GET", f"/v1/functions/{name}")

    def create_revision(self, spec: FunctionSpec, bundle: Digest) -> FunctionView | Building:
        """Deploy a spec whose bundle and models have been uploaded; `deploy` does all. Building: one with models."""
        body = msgspec.json.encode({"spec": spec, "bundle": bundle})
        response = self._request("POST", "/v1/functions", content=body, headers=_JSON)
        if response.status_code == 202:
            return decoded(Building, response.content)
        return decoded(FunctionView, response.content)

    def deploy(
        self,
        *functions: AnyFunction,
        include: Sequence[str] = (),
        wait: bool = True,
        timeout_s: float | None = None,
        force: bool = False,
    ) -> list[FunctionView]:
        """Deploy functions of this process: by source when they are in a module's file, else by value.

        Returns when calls go to the new revisions, which takes the builds of their models, and a worker's start while
        one of the old is warm; `wait=False` returns at once, without those whose models are being built. Unchanged code
        and options make no new revision, unless `force`. Raises BuildFailed when a model cannot be built,
        FunctionStartFailed when a new revision does not start, TimeoutError after `timeout_s` (the function's own
        startup_timeout when not given); the old one serves on.
        """
        from gpufn import _deployment  # noqa: PLC0415

        made = []
        for deployable in _deployment.deployables(functions, include):
            deployment = _deployment.deploy(self, deployable, force=force)
            if deployment.lacking:
                warnings.warn(f"calls of {deployment.function} will wait: {deployment.lacking}", stacklevel=2)
            made.append(deployment)
        if wait:
            return [_deployment.finish(self, deployment, timeout_s) for deployment in made]
        return [deployment.view for deployment in made if deployment.view is not None]

    def delete(self, name: str) -> None:
        """Queued calls are cancelled, running ones finish."""
        self._request("DELETE", f"/v1/functions/{name}")

    def revisions(self, name: str) -> list[RevisionView]:
        """Every revision, the oldest first."""
        return self._json(Revisions, "GET", f"/v1/functions/{name}/revisions").revisions

    def revision(self, name: str, number: int) -> RevisionProgress:
        """One revision, and how far the builds of its models are."""
        return self._json(RevisionProgress, "GET", f"/v1/functions/{name}/revisions/{number}")

    def rollback(self, name: str, revision: int | None = None) -> FunctionView:
        """Make an earlier revision the active one; None: the one before it."""
        body = msgspec.json.encode({} if revision is None else {"revision": revision})
        return self._json(FunctionView, "POST", f"/v1/functions/{name}/rollback", content=body, headers=_JSON)

    def scale(self, name: str, min_workers: int | None, max_workers: int | None) -> FunctionView:
        """Take the place of the spec's bounds; None: back to the spec's."""
        body = msgspec.json.encode({"min_workers": min_workers, "max_workers": max_workers})
        return self._json(FunctionView, "POST", f"/v1/functions/{name}/scale", content=body, headers=_JSON)

    def why(self, name: str) -> WhyView:
        """Why it has the workers it has, and why its calls wait."""
        return self._json(WhyView, "GET", f"/v1/functions/{name}/why")

    def logs(self, name: str, *, tail: int = 100, follow: bool = False) -> Iterator[LogLine]:
        """The last lines that its workers wrote; with `follow` also those that come."""
        params = {"tail": str(tail), "follow": "true" if follow else "false"}
        with self._stream("GET", f"/v1/functions/{name}/logs", params=params) as response:
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
        wanted = {"function": function, "state": state and state.value, "since": since, "limit": limit}
        params = {option: str(value) for option, value in wanted.items() if value is not None}
        path = "/v1/calls" if name is None else f"/v1/functions/{name}/calls"
        return self._json(Calls, "GET", path, params=params).calls

    def usage(
        self, *, function: str | None = None, key: str | None = None, since: str | None = None, until: str | None = None
    ) -> list[UsageView]:
        """What calls took, per day, function and API key (``platform``: none). `since` and `until` are days of UTC, as
        ``2026-11-21``; without them the last seven."""
        wanted = {"function": function, "key": key, "since": since, "until": until}
        params = {option: value for option, value in wanted.items() if value is not None}
        return self._json(Usages, "GET", "/v1/usage", params=params).usage

    # Dead letters

    def dead_letters(self, function: str | None = None, *, limit: int = 20) -> list[DeadLetterView]:
        """Submitted calls that failed for good, of a function or of all, the newest first."""
        path = "/v1/dlq" if function is None else f"/v1/dlq/{function}"
        return self._json(DeadLetters, "GET", path, params={"limit": str(limit)}).letters

    def dead_letter(self, function: str, id: str) -> DeadLetterView:  # noqa: A002
        """One, with its error's traceback. Raises DeadLetterNotFound."""
        return self._json(DeadLetterView, "GET", f"/v1/dlq/{function}/{id}")

    def dead_letter_payload(self, function: str, id: str) -> bytes:  # noqa: A002
        """The arguments that it was called with, as they came."""
        return self._request("GET", f"/v1/dlq/{function}/{id}/payload").content

    def replay(self, function: str, id: str) -> Replayed:  # noqa: A002
        """Submit it again, as a new call of the revision that serves now."""
        view = self._json(InvocationView, "POST", f"/v1/dlq/{function}/{id}/replay")
        return Replayed(letter=id, invocation=view.id)

    def replay_all(self, function: str) -> list[Replayed]:
        """At most a thousand at a time."""
        return self._json(AllReplayed, "POST", f"/v1/dlq/{function}/replay").replayed

    def drop_dead_letter(self, function: str, id: str) -> int:  # noqa: A002
        """Remove it and its payload; returns 1."""
        self._request("DELETE", f"/v1/dlq/{function}/{id}")
        return 1

    def drop_dead_letters(self, function: str) -> int:
        """Remove all of a function; returns how many."""
        return self._json(Dropped, "DELETE", f"/v1/dlq/{function}").dropped

    def has_bundle(self, digest: Digest) -> bool:
        """Whether it has been uploaded."""
        return self._exists(f"/v1/bundles/{digest}")

    def put_bundle(self, digest: Digest, data: bytes) -> bool:
        """Upload unless it is there; False when it was."""
        if self.has_bundle(digest):
            return False
        try:
            self._request("PUT", f"/v1/bundles/{digest}", content=data, headers={"content-type": "application/zip"})
        except PayloadTooLarge as error:
            mib = len(data) / (1 << 20)
            raise PayloadTooLarge(
                f"the bundle of {mib:.1f} MiB is larger than the gateway takes: leave large files out, and read them "
                "in the worker from a disk or an address"
            ) from error
        return True

    # Models

    def put_artifact(self, digest: str, path: Path, *, sent: Callable[[int], None] | None = None) -> bool:
        """Upload a model's file unless it is there; False when it was. `sent` gets the bytes so far."""
        if self._exists(f"/v1/artifacts/{digest}"):
            return False
        headers = {"content-type": media.BYTES, "content-length": str(path.stat().st_size)}
        content = _FileContent(path, sent)
        self._request("PUT", f"/v1/artifacts/{digest}", content=content, headers=headers, timeout=self._endless)
        return True

    def create_build(self, model: ModelSpec, device: str | None = None) -> BuildView:
        """Build engines of a model whose files have been uploaded; without `device`, for the nodes' CPUs."""
        body = msgspec.json.encode({"model": model} | ({"device": device} if device else {}))
        return self._json(BuildView, "POST", "/v1/builds", content=body, headers=_JSON)

    def builds(self) -> list[BuildView]:
        """Every build, the newest first."""
        return self._json(Builds, "GET", "/v1/builds").builds

    def build(self, id: str, *, wait_s: float = 0.0, since: int | None = None) -> BuildView:  # noqa: A002
        """How a build stands: at its next change, after the one that `since` names (a view's `change`) or else from
        now, or after `wait_s`, which is 60 at most. Raises BuildNotFound."""
        params = {"wait": f"{wait_s:g}"} | ({} if since is None else {"since": str(since)})
        return self._json(BuildView, "GET", f"/v1/builds/{id}", params=params, timeout=MANAGE_TIMEOUT_S + wait_s)

    def build_report(self, id: str, *, page: bool = False) -> bytes:  # noqa: A002
        """What was built, compared and measured: as JSON, or as a `page` of HTML."""
        return self._request("GET", f"/v1/builds/{id}/report{'.html' if page else ''}").content

    def engines(self) -> list[EngineView]:
        """Every engine, the newest first."""
        return self._json(Engines, "GET", "/v1/engines").engines

    def collect_engines(self, *, dry_run: bool = False) -> Collected:
        """Remove the engines that no function and no build uses; with `dry_run`, only say which."""
        body = msgspec.json.encode({"dry_run": dry_run})
        return self._json(Collected, "POST", "/v1/engines/gc", content=body, headers=_JSON)

    def models(self) -> list[ModelView]:
        """The models of every function, as it serves."""
        return self._json(Models, "GET", "/v1/models").models

    def model(self, name: str) -> ModelView:
        """One model: `NAME`, or `FUNCTION.PARAMETER` for one inside a function. Raises FunctionNotFound."""
        return self._json(ModelView, "GET", f"/v1/models/{name}")

    def cancel_build(self, id: str) -> BuildView:  # noqa: A002
        """Ask for its end; what waits for it fails."""
        return self._json(BuildView, "DELETE", f"/v1/builds/{id}")

    # Schedules

    def schedules(self, function: str | None = None) -> list[ScheduleView]:
        """When functions are called by themselves; those that they declare and those that were added."""
        params = {} if function is None else {"function": function}
        return self._json(Schedules, "GET", "/v1/schedules", params=params).schedules

    def add_schedule(
        self,
        function: str,
        schedule: Schedule | None = None,
        *,
        in_s: float | None = None,
        arguments: Mapping[str, Any] | None = None,
    ) -> ScheduleView:
        """Call a function by itself, as `schedule` says; or once, `in_s` seconds from now, with `arguments`."""
        wanted: dict[str, Any] = {"function": function}
        if schedule is not None:
            given = {"timezone": schedule.timezone, "missed": schedule.missed, "method": schedule.method}
            when = {"cron": schedule.cron} if schedule.cron else {"at": schedule.at}
            wanted |= given | when | {"arguments": dict(arguments or schedule.arguments)}
        else:
            name, _, method = function.partition(".")
            wanted |= {"function": name, "method": method, "in_s": in_s, "arguments": dict(arguments or {})}
        body = msgspec.json.encode(wanted)
        return self._json(ScheduleView, "POST", "/v1/schedules", content=body, headers=_JSON)

    def remove_schedule(self, id: str) -> None:  # noqa: A002
        """One that was added. Raises ScheduleNotFound."""
        self._request("DELETE", f"/v1/schedules/{id}")

    def pause_schedule(self, id: str, *, paused: bool = True) -> ScheduleView:  # noqa: A002
        """Make no calls until it is resumed (`paused=False`); those in between are not made up for."""
        return self._json(ScheduleView, "POST", f"/v1/schedules/{id}/{'pause' if paused else 'resume'}")

    def run_schedule(self, id: str) -> InvocationView:  # noqa: A002
        """One call more, now."""
        return self._json(InvocationView, "POST", f"/v1/schedules/{id}/run")

    # The platform

    def nodes(self) -> list[dict[str, Any]]:
        """What each node reported last: its devices and processes."""
        return self._json(Nodes, "GET", "/v1/nodes").nodes

    def keys(self) -> list[KeyView]:
        """The API keys, without their secrets."""
        return self._json(Keys, "GET", "/v1/keys").keys

    def create_key(
        self,
        label: str,
        scopes: Sequence[str],
        *,
        rate: float | None = None,
        burst: int | None = None,
        concurrency: int | None = None,
        queued: int | None = None,
    ) -> KeyView:
        """Make an API key; its secret is in the answer, this once.

        Its limits: `rate` in calls per second, of which `burst` may come at once; `concurrency`, calls that are waited
        for at a time; `queued`, submitted calls that have not ended.
        """
        limits = KeyLimits(rate, burst, concurrency, queued)
        body = msgspec.json.encode({"label": label, "scopes": list(scopes), "limits": limits})
        return self._json(KeyView, "POST", "/v1/keys", content=body, headers=_JSON)

    def delete_key(self, id: str) -> None:  # noqa: A002
        """Who uses it is refused from then on."""
        self._request("DELETE", f"/v1/keys/{id}")

    def webhook_secret(self, key: str = "platform", *, change: bool = False) -> str:
        """What webhooks are signed with, for those who receive them: of the calls of an API key, or the platform's own.

        `change` makes a new one; until the next change, the one before it signs as well.
        """
        return self._json(WebhookSecret, "POST" if change else "GET", f"/v1/keys/{key}/webhook-secret").secret

    def is_alive(self) -> bool:
        """Whether a gateway answers."""
        return self._status("/healthz") == 200

    def is_ready(self) -> bool:
        """Whether a call would be served."""
        return self._status("/readyz") == 200

    def metrics(self) -> str:
        """In the text format of Prometheus."""
        return self._request("GET", "/metrics").text

    def openapi(self) -> dict[str, Any]:
        """OpenAPI 3.1 of the deployed functions."""
        return self._json(dict[str, Any], "GET", "/openapi.json")


class _FileContent:
    """A file as a request's body; each try reads it from its beginning."""

    def __init__(self, path: Path, sent: Callable[[int], None] | None) -> None:
        self._path = path
        self._sent = sent

    def __iter__(self) -> Iterator[bytes]:
        count = 0
        with self._path.open("rb") as file:
            while chunk := file.read(_CHUNK_BYTES):
                yield chunk
                count += len(chunk)
                if self._sent is not None:
                    self._sent(count)


def _call_headers(content_type: str, accept: str, timeout_s: float | None, priority: Priority | None) -> dict[str, str]:
    headers = {"content-type": content_type, "accept": accept}
    if timeout_s is not None:
        headers["x-gpufn-timeout"] = f"{timeout_s:g}"
    if priority is not None:
        headers["x-gpufn-priority"] = priority.value
    return headers
