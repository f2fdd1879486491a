"""Start a web session, and report how it ended."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Coroutine

import msgspec

from gpufn_core.domain.invocation import OutcomeKind
from gpufn_core.encoding import media
from gpufn_core.errors import FunctionRaised, GpufnError, PlatformError
from gpufn_core.protocol.codec import pack
from gpufn_core.protocol.messages import ResultReply
from gpufn_core.protocol.streams import web_session
from gpufn_core.protocol.streams.web_session import WebRequest
from gpufn_gateway import problems
from gpufn_gateway.calls.arguments import Arguments
from gpufn_gateway.calls.call_bodies import CallBody
from gpufn_gateway.calls.prepare import Calls, cancel_unless_ended
from gpufn_gateway.calls.prepared_call import PreparedCall
from gpufn_gateway.functions.target import Target
from gpufn_gateway.http.body_reader import Receive, Scope
from gpufn_gateway.problems import Problem
from gpufn_gateway.web import headers as fields
from gpufn_gateway.web.match import Match
from gpufn_platform.web.pending_session import PendingSession

log = logging.getLogger(__name__)

# Faults of the application's own code. Its clients do not see the details.
_OWN_FAULTS = frozenset({OutcomeKind.RAISED, OutcomeKind.REJECTED})
_RAISED = "The application failed. The log of its function has the reason."


async def prepare(
    calls: Calls, match: Match, scope: Scope, receive: Receive, first: bytes, *, has_more: bool, visitor: str
) -> PreparedCall:
    """Prepare the session of a request by a `visitor` (`gpufn_gateway.web.visitor`). Raises GpufnError."""
    request = _request_of(match, scope, has_more=has_more)

    async def read(name: str, target: Target, headers: dict[bytes, bytes], receive: Receive) -> Arguments:
        return Arguments(web_session.CONTENT_TYPE, media.MSGPACK, CallBody(pack(request, first)))

    headers = dict(scope["headers"])
    return await calls.prepare(match.address.name, headers, receive, read=read, principal=match.principal, key=visitor)


def _request_of(match: Match, scope: Scope, *, has_more: bool) -> WebRequest:
    is_socket = scope["type"] == "websocket"
    client, server = scope.get("client"), scope.get("server")
    return WebRequest(
        is_socket=is_socket,
        method=scope.get("method", "GET"),
        scheme=scope["scheme"],
        http_version=scope["http_version"],
        path=scope["path"],
        raw_path=scope["raw_path"],
        root_path=match.address.root,
        query=scope["query_string"],
        headers=fields.to_application(scope["headers"], is_public=match.web.public),
        client=None if client is None else (str(client[0]), int(client[1])),
        server=None if server is None else (str(server[0]), server[1]),
        subprotocols=tuple(scope.get("subprotocols", ())),
        has_more=has_more,
    )


@contextlib.asynccontextmanager
async def running(calls: Calls, call: PreparedCall) -> AsyncIterator[PendingSession]:
    """Context in which the session runs. It is cancelled if the context ends first."""
    pending = calls.start_session(call)
    pending.future.add_done_callback(lambda ended: _count(calls, call, pending.id, ended))
    try:
        yield pending
    finally:
        cancel_unless_ended(pending)
        calls.discard(call)


@contextlib.asynccontextmanager
async def alongside(pending: PendingSession, follow: Coroutine[None, None, None]) -> AsyncIterator[None]:
    """Context in which the client's side of a session is followed. An error there ends the session."""
    task = asyncio.create_task(follow)
    task.add_done_callback(lambda ended: _interrupt(pending, ended))
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])


def _interrupt(pending: PendingSession, ended: asyncio.Task[None]) -> None:
    """End the session if its client's side failed."""
    if ended.cancelled() or (error := ended.exception()) is None:
        return
    if not isinstance(error, GpufnError):
        log.error("cannot follow the client of session %s", pending.id, exc_info=error)
        error = PlatformError()
    pending.interrupt(error)


async def failure(calls: Calls, call: PreparedCall, pending: PendingSession) -> Problem | None:
    """Wait for the end of a session whose events have ended. Return the reason of a failure, for its client."""
    try:
        reply, _ = await pending.future
    except GpufnError as error:
        return problems.problem_of(calls.explain(call, error))
    if reply.kind is OutcomeKind.SUCCEEDED:
        return None
    if reply.kind in _OWN_FAULTS:
        return problems.from_info(FunctionRaised(_RAISED).info())
    problem = problems.from_outcome(reply.kind, reply.error)
    first_line = problem.info.message.partition("\n")[0]  # the output of the worker follows
    return msgspec.structs.replace(problem, info=msgspec.structs.replace(problem.info, message=first_line))


def _count(calls: Calls, call: PreparedCall, invocation: str, ended: asyncio.Future[tuple[ResultReply, bytes]]) -> None:
    stats = calls.telemetry.of(call.target.name)
    if ended.cancelled():
        return
    if (error := ended.exception()) is not None:
        stats.count_failure(error.code if isinstance(error, GpufnError) else "")
        if calls.tracing is not None:
            calls.tracing.failed(call, invocation, error)
        return
    reply, _ = ended.result()
    ended_at = calls.clock.time()
    stats.count_end(reply, ended_at - call.now, ended_at, call.trace)
    if calls.tracing is not None:
        calls.tracing.ended(call, reply, ended_at)
