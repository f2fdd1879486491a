"""The platform for an adapter: functions, calls and figures that the principal of a request may see.

Every method raises GpufnError; the application sends it in the adapter's form. Arguments and results are JSON.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from gpufn_core.domain.invocation import InvocationState, OutcomeKind
from gpufn_core.domain.revision import Revision
from gpufn_core.domain.traffic import is_routing
from gpufn_core.encoding import media
from gpufn_core.errors import InvocationNotFound
from gpufn_core.ids import new_invocation_id
from gpufn_core.protocol.records import CallRecord
from gpufn_core.spec.naming import variant_names
from gpufn_gateway.calls.arguments import Arguments, ReadArguments
from gpufn_gateway.calls.prepare import Calls
from gpufn_gateway.calls.prepared_call import PreparedCall
from gpufn_gateway.functions.target import Target
from gpufn_gateway.http.body_reader import Receive as ReceiveBody
from gpufn_gateway.http.sse import CallStream, StreamEncoding
from gpufn_gateway.openapi.request_bounds import MAX_LISTED
from gpufn_gateway.protocols.captured import Capture, Outcome
from gpufn_gateway.protocols.client_files import ClientFiles
from gpufn_gateway.protocols.live_items import LiveItems
from gpufn_gateway.protocols.multipart import FormParts, form_parts
from gpufn_gateway.routes.calls.invoke import Invoke
from gpufn_gateway.routes.requests import headers_of, principal_of
from gpufn_gateway.submitted.dead_letters import DeadLetters
from gpufn_gateway.submitted.submit import WEBHOOK, Submissions
from gpufn_gateway.webhooks.secrets import WebhookSecrets


class CallOptions(NamedTuple):
    """Options of one call. None leaves the choice to the function. `priority` is hi, normal or low. `webhook` is a URL
    for the end of a submitted call, and `webhook_form` one of `Adapter.webhooks`. A submitted call with the same `key`
    is the same call. `is_live`: the items of a submitted generator call can be read as they come (`live`)."""

    timeout_s: float | None = None
    priority: str | None = None
    webhook: str | None = None
    webhook_form: str = ""
    key: str | None = None
    is_live: bool = False

    def headers(self) -> dict[bytes, bytes]:
        given = {
            b"x-gpufn-timeout": self.timeout_s,
            b"x-gpufn-priority": self.priority,
            b"idempotency-key": self.key,
            WEBHOOK: self.webhook,
        }
        return {name: str(value).encode() for name, value in given.items() if value is not None}


class Figures(NamedTuple):
    """The queue and the workers of a function. `succeeded` and `failed` count the calls of waiting clients at this
    gateway since it started."""

    queued: int
    running: int
    ready: int
    starting: int
    succeeded: int
    failed: int


DEFAULTS = CallOptions()


class Platform:
    def __init__(
        self,
        calls: Calls,
        invoke: Invoke,
        submissions: Submissions,
        letters: DeadLetters,
        *,
        webhook_secrets: WebhookSecrets,
        files: ClientFiles,
        live: LiveItems,
    ) -> None:
        self._calls = calls
        self._invoke = invoke
        self._submissions = submissions
        self._letters = letters
        self._webhook_secrets = webhook_secrets
        self.files = files
        self.live = live

    # --- functions ---------------------------------------------------------------------------------------------------

    def functions(self, request: Request) -> Iterator[Target]:
        """Yield the functions and methods that the client may call."""
        principal, registry = principal_of(request), self._calls.registry
        for name in sorted(itertools.filterfalse(variant_names.is_variant, registry.functions)):
            revision = registry.revisions.get(name, {}).get(registry.functions[name].serving)
            if revision is not None and not revision.spec.serves_app and principal.may_invoke(name):
                yield from (registry.target(name, method.name) for method in revision.spec.methods)

    def resolve(self, name: str, request: Request) -> Target:
        """Return the function that a client means; of a variant, its function. Raises FunctionNotFound,
        AmbiguousFunction, Forbidden."""
        principal = principal_of(request)
        if "(" in name:
            function, _, method = variant_names.split(name)
            name = f"{function}.{method}" if method else function
        target = self._calls.registry.resolve(name, principal)
        principal.require_invoke(target.name)
        return target

    def revisions(self, target: Target) -> list[Revision]:
        """Return the revisions of a function, the newest first."""
        revisions = self._calls.registry.revisions.get(target.name, {})
        return [revisions[number] for number in sorted(revisions, reverse=True)]

    def figures(self, name: str, request: Request) -> Figures:
        """Return the latest figures of a function."""
        target = self.resolve(name, request)
        status = self._calls.registry.status_for(principal_of(request), target.name)
        outcomes = self._calls.telemetry.of(target.name).outcomes
        succeeded = outcomes.get(OutcomeKind.SUCCEEDED, 0)
        failed = sum(outcomes.values()) - succeeded
        if status is None:
            return Figures(0, 0, 0, 0, succeeded, failed)
        workers = status.workers
        starting = workers.starting + workers.resuming
        return Figures(status.queued or 0, status.running or 0, workers.ready, starting, succeeded, failed)

    # --- calls that a client waits for -------------------------------------------------------------------------------

    @property
    def max_argument_bytes(self) -> int:
        """Return the limit for the arguments of a call."""
        return self._calls.bodies.max_bytes

    async def body(self, request: Request) -> bytes:
        """Read the body of a request, within the limit for arguments."""
        return await self._calls.bodies.read(headers_of(request), request.receive, may_share=False)

    async def form(self, request: Request) -> FormParts:
        """Read the body of a request as a form. Raises InvalidInput."""
        return form_parts(request.headers.get("content-type", ""), await self.body(request))

    async def invoke(self, name: str, arguments: bytes, request: Request, options: CallOptions = DEFAULTS) -> Outcome:
        """Call a function and wait. The call is cancelled if the client disconnects. Raises CallFailed."""
        call = await self._prepare(name, arguments, request, options)
        capture = Capture()
        await self._invoke.respond(call, request.receive, capture.send, capture)
        return capture.outcome()

    async def stream(
        self,
        name: str,
        arguments: bytes,
        request: Request,
        encoding: StreamEncoding,
        options: CallOptions = DEFAULTS,
    ) -> ASGIApp:
        """Return a response that sends the items of a generator as `encoding` writes them."""
        call = await self._prepare(name, arguments, request, options)

        async def respond(scope: Scope, receive: Receive, send: Send) -> None:
            try:
                await CallStream(self._calls, call, encoding).run(receive, send)
            finally:
                self._calls.discard(call)

        return respond

    async def _prepare(self, name: str, arguments: bytes, request: Request, options: CallOptions) -> PreparedCall:
        read = self._reader(arguments, is_queued=False)
        return await self._calls.prepare(name, _call_headers(request, options), request.receive, read=read)

    def _reader(self, arguments: bytes, *, is_queued: bool) -> ReadArguments:
        async def read(name: str, target: Target, headers: dict[bytes, bytes], receive: ReceiveBody) -> Arguments:
            target.signature.check(arguments)
            body = self._calls.bodies.wrap(arguments, may_share=False, is_queued=is_queued)
            return Arguments(media.JSON, media.JSON, body)

        return read

    # --- submitted calls ---------------------------------------------------------------------------------------------

    async def submit(
        self, name: str, arguments: bytes, request: Request, options: CallOptions = DEFAULTS
    ) -> CallRecord:
        """Store a call that runs later."""
        read = self._reader(arguments, is_queued=True)
        headers = _call_headers(request, options)
        if not options.is_live:
            _, record = await self._submissions.accept(
                name, headers, request.receive, read=read, webhook_form=options.webhook_form
            )
            return record
        invocation = new_invocation_id()  # needed first, to miss no item
        self.live.follow(invocation)
        try:
            _, record = await self._submissions.accept(
                name,
                headers,
                request.receive,
                read=read,
                webhook_form=options.webhook_form,
                invocation=invocation,
                is_live=True,
            )
        except BaseException:
            self.live.forget(invocation)
            raise
        return record

    async def status(self, invocation: str, request: Request, *, of: str | None = None) -> dict[str, Any]:
        """Return the status of a submitted call, as `GET /v1/invocations/{id}` does. Raises InvocationNotFound, also
        for a call of another function than `of`, if that is given."""
        view = await self._submissions.status(invocation, principal_of(request))
        self._check_function(of, view["function"], invocation, request)
        return view

    async def result(
        self, invocation: str, request: Request, wait_s: float = 0.0, *, of: str | None = None
    ) -> tuple[dict[str, Any], Outcome | None]:
        """Wait up to `wait_s` for a submitted call. Return its status, and its result if it has succeeded. Raises as
        `status`."""
        record, outcome = await self.outcome(invocation, request, wait_s)
        self._check_function(of, record.function, invocation, request)
        return await self._submissions.view(record, principal_of(request)), outcome

    async def outcome(
        self, invocation: str, request: Request, wait_s: float = 0.0
    ) -> tuple[CallRecord, Outcome | None]:
        """Like `result`, with the record of the call instead of its status, which may need requests to runners."""
        record, body = await self._submissions.result(invocation, principal_of(request), wait_s)
        if record.state is not InvocationState.SUCCEEDED:
            return record, None
        capture = Capture()
        await self._submissions.send_outcome(record, body, capture.send, response_format=capture)
        return record, capture.outcome()

    async def record(self, invocation: str, request: Request) -> CallRecord:
        """Return the record of a submitted call, without its result. Raises InvocationNotFound."""
        record, _ = await self._submissions.result(invocation, principal_of(request), 0.0)
        return record

    async def recent(self, request: Request, limit: int) -> list[dict[str, Any]]:
        """Return the status of the newest submitted calls that the client may read."""
        return await self._submissions.recent("*", limit, principal=principal_of(request))

    async def cancel(self, invocation: str, request: Request, *, of: str | None = None) -> CallRecord:
        """Cancel a submitted call unless it has ended. Raises as `status`."""
        await self.status(invocation, request, of=of)
        record, _ = await self._submissions.cancel(invocation, principal_of(request))
        return record

    async def cancel_queued(self, name: str, request: Request) -> int:
        """Cancel the newest queued calls of a function, at most MAX_LISTED; return how many."""
        function = self.resolve(name, request).name
        principal = principal_of(request)
        queued = await self._submissions.queued(function, MAX_LISTED)
        return sum([(await self._submissions.cancel(id_, principal))[1] for id_ in queued])

    async def retry(self, name: str, invocation: str, request: Request) -> CallRecord:
        """Submit a call again that has failed for good. It gets a new id. Raises DeadLetterNotFound."""
        function = self.resolve(name, request).name
        return await self._letters.replay(function, invocation, principal_of(request))

    # --- webhooks ----------------------------------------------------------------------------------------------------

    async def webhook_secret(self, request: Request) -> str:
        """Return the secret that signs the webhooks of the client's calls."""
        return (await self._webhook_secrets.of(principal_of(request).owner))[0]

    def _check_function(self, name: str | None, function: str, invocation: str, request: Request) -> None:
        """Raise InvocationNotFound for a call of another function than the client named."""
        if name is None:
            return
        full = self._calls.registry.find_or_deleted(name.partition(".")[0], principal_of(request))
        if full != function.partition(".")[0]:
            raise InvocationNotFound(f"There is no invocation {invocation} of {full}.")


def _call_headers(request: Request, options: CallOptions) -> dict[bytes, bytes]:
    """Return the credential of a request, its trace, the fields that a split may use, and the options of its call."""
    given = headers_of(request)
    kept = (b"authorization", b"host", b"origin", b"sec-fetch-site", b"sec-fetch-mode", b"traceparent", b"tracestate")
    return {name: value for name, value in given.items() if name in kept or is_routing(name)} | options.headers()


def json_of(outcome: Outcome) -> msgspec.Raw:
    """Return a result as JSON. Bytes become a string in base64."""
    if outcome.content_type == media.JSON:
        return msgspec.Raw(outcome.body)
    return msgspec.Raw(msgspec.json.encode(outcome.body))
