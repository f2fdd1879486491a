"""Serve `GET /v1/functions/{fn}/exec`, a WebSocket: check the rights, start the command, record both ends."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections.abc import Callable, MutableMapping
from typing import Any, Final, NamedTuple

import msgspec
from starlette.requests import Request
from starlette.routing import Route
from starlette.types import ASGIApp

from gpufn_core.domain.invocation import OutcomeKind
from gpufn_core.encoding import media
from gpufn_core.errors import FunctionNotFound, GpufnError, InvalidInput
from gpufn_core.protocol.codec import pack
from gpufn_core.protocol.streams import terminal
from gpufn_core.protocol.streams.terminal import Start
from gpufn_core.spec.naming.names import IN_PATH, shown
from gpufn_core.spec.naming.variant_names import is_variant
from gpufn_gateway import problems
from gpufn_gateway.audit.request_audit import REFUSALS, RequestAudit, add_details
from gpufn_gateway.auth.access import Principal
from gpufn_gateway.auth.scopes import EXEC, INVOKE
from gpufn_gateway.calls.arguments import Arguments
from gpufn_gateway.calls.call_bodies import CallBody
from gpufn_gateway.calls.prepare import Calls
from gpufn_gateway.calls.prepared_call import PreparedCall
from gpufn_gateway.functions.secret_use import check_secret_view
from gpufn_gateway.functions.target import Target
from gpufn_gateway.http.body_reader import ClientDisconnected, Receive, Scope, Send
from gpufn_gateway.problems import Problem, RouteError
from gpufn_gateway.routes.requests import principal_of, route
from gpufn_gateway.terminals.connection import Connection, report
from gpufn_gateway.terminals.records import TerminalRecords
from gpufn_gateway.web import session
from gpufn_gateway.web.socket import refuse
from gpufn_platform.web.pending_session import PendingSession

PREFIX: Final = "/v1/functions/"
SUFFIX: Final = "/exec"
_TEMPLATE: Final = f"{PREFIX}{{fn}}{SUFFIX}"
_START_S: Final = 30.0  # for the client's first message
_STARTED, _ENDED = 101, 200  # statuses of the records


def function_in(path: str) -> str | None:
    """Return the name in the path of a terminal; None for another path.

    >>> function_in("/v1/functions/prod/shop/clf/exec"), function_in("/v1/functions/clf/invoke")
    ('prod/shop/clf', None)
    """
    name = path.removeprefix(PREFIX).removesuffix(SUFFIX)
    return name if path == PREFIX + name + SUFFIX and IN_PATH.fullmatch(name) else None


class _Client(NamedTuple):
    """`scope` is the scope of its WebSocket, as the audit log reads it. `check` raises Unauthorized once the client has
    other rights."""

    principal: Principal
    scope: MutableMapping[str, Any]
    receive: Receive
    send: Send
    check: Callable[[], None]


class Terminals:
    def __init__(self, calls: Calls, records: TerminalRecords, audit: RequestAudit) -> None:
        self._calls = calls
        self._records = records
        self._audit = audit

    def routes(self) -> list[Route]:
        return [route("GET", f"{PREFIX}{{fn:name}}{SUFFIX}", self.explain, EXEC, of_functions=True)]

    async def explain(self, request: Request) -> ASGIApp:
        """Refuse a plain request, after the checks of a WebSocket."""
        self._check(request.path_params["fn"], principal_of(request))
        raise RouteError(426, f"A terminal is a WebSocket: use `gpufn exec {request.path_params['fn']}`.")

    async def serve_socket(self, name: str, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a WebSocket. An error before its start is an HTTP response, a later one a status and a close code."""
        noted: dict[str, Any] = {**scope, "method": "GET"}
        access = self._calls.access
        stream = contextlib.ExitStack()
        try:
            principal = access.authenticate(dict(scope["headers"]))
            full = self._check(name, principal)
            self._audit.check_writable()
            stream.enter_context(access.streams.open(access.sender_of(principal)))
        except GpufnError as error:
            problem = problems.problem_of(error)
            if problem.status in REFUSALS:
                self._audit.refuse(noted, _TEMPLATE, problem.status, problem.code)
            await refuse(error, send)
            return
        noted |= {"gpufn.principal": principal, "path_params": {"fn": full}}
        check = functools.partial(access.check_unchanged, dict(scope["headers"]), principal)
        client = _Client(principal, noted, receive, send, check)
        with stream:
            await self._serve(full, client)

    async def _serve(self, full: str, client: _Client) -> None:
        receive, send = client.receive, client.send
        await receive()  # websocket.connect
        await send({"type": "websocket.accept"})
        try:
            start = await _read_start(receive)
            target = await self._records.add(self._calls.registry.function(full))
        except ClientDisconnected:
            return
        except GpufnError as error:
            await report(send, problems.problem_of(error))
            return
        try:
            await self._run(start, target, client)
        finally:
            await self._records.remove(target)

    def _check(self, name: str, principal: Principal) -> str:
        """Return the full name of a function for which the principal may open a terminal. Raises GpufnError."""
        registry = self._calls.registry
        full = registry.find(name, principal)
        if is_variant(full):
            raise FunctionNotFound(f"{shown(full)} is a variant: open a terminal of its function.")
        principal.require_on(EXEC, full)
        check_secret_view(principal, registry.serving(registry.function(full)))
        return full

    async def _run(self, start: Start, target: Target, client: _Client) -> None:
        noted = client.scope
        variant = target.revision.variant
        revision = "" if variant is None else variant.revision
        add_details(noted, command=_shown(start), tty=start.tty, revision=revision, terminal=target.name)
        await self._audit.record(noted, _TEMPLATE, _STARTED, "")
        started = time.monotonic()
        connection: Connection | None = None
        problem: Problem | None = None
        try:
            call = await self._prepare(start, target, client)
            async with session.running(self._calls, call) as pending:
                connection = Connection(pending, client.receive, client.send, client.check)
                await connection.run()
                problem = await self._problem(call, pending)
        except GpufnError as error:
            problem = problems.problem_of(error)
        finally:
            add_details(noted, seconds=round(time.monotonic() - started, 1))
            if connection is not None:
                add_details(
                    noted,
                    exit_code=connection.exit_code,
                    worker=connection.worker,
                    input_bytes=connection.taken,
                    output_bytes=connection.sent,
                    client_left=connection.is_left or None,
                )
            await self._audit.record(
                noted, _TEMPLATE, _ENDED if problem is None else problem.status, "" if problem is None else problem.code
            )
        if connection is not None and connection.is_left:
            return
        if problem is not None:
            await report(client.send, problem)
        elif connection is not None:
            await connection.close()

    async def _prepare(self, start: Start, target: Target, client: _Client) -> PreparedCall:
        async def read(name: str, target: Target, headers: dict[bytes, bytes], receive: Receive) -> Arguments:
            return Arguments(terminal.CONTENT_TYPE, media.MSGPACK, CallBody(pack(start)))

        # The right to a terminal includes its only call.
        caller = Principal(client.principal.id, frozenset({f"{INVOKE}:{target.name}"}), client.principal.limits)
        headers = dict(client.scope["headers"])
        return await self._calls.prepare(
            target.name, headers, client.receive, read=read, principal=caller, target=target
        )

    async def _problem(self, call: PreparedCall, pending: PendingSession) -> Problem | None:
        """Return why a session failed whose events have ended. The client sees the details: it has the right to."""
        try:
            reply, _ = await pending.future
        except GpufnError as error:
            return problems.problem_of(self._calls.explain(call, error))
        return None if reply.kind is OutcomeKind.SUCCEEDED else problems.from_outcome(reply.kind, reply.error)


async def _read_start(receive: Receive) -> Start:
    """Raises InvalidInput, ClientDisconnected."""
    try:
        async with asyncio.timeout(_START_S):
            message = await receive()
    except TimeoutError:
        raise InvalidInput("the message that starts a terminal did not arrive in time") from None
    if message["type"] != "websocket.receive":
        raise ClientDisconnected
    return terminal.parse_start(message.get("text") or "")


def _shown(start: Start) -> str:
    return msgspec.json.encode(start.command).decode() if start.command else "a shell"
