"""The ASGI application: checks for every request, then the hot path or Starlette's router.

1. Requests above the rate of their address, with too many headers, or with a method that is not allowed are rejected.
   The console responds to its own requests; a request of its pages to the API is authorized by the key of the session.
2. Invoke and submit go straight to `Invoke`, inference goes to `Inference`.
3. All other requests are authenticated, then routed.
4. An exception before the response starts becomes a problem response in the format of the path's protocol. An
   unexpected exception shows only an incident id. A request that shutdown cancels gets `gateway_unavailable`.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import Awaitable, Callable, MutableMapping, Sequence, Set
from typing import Any, Final

from starlette.exceptions import HTTPException
from starlette.routing import Match, Route, Router

from gpufn_core.errors import GatewayUnavailable, GpufnError, RateLimited
from gpufn_core.spec import web_spec
from gpufn_core.spec.naming import names
from gpufn_gateway import problems
from gpufn_gateway.audit.request_audit import REFUSALS, RequestAudit, is_audited
from gpufn_gateway.auth.access import METHODS, OPEN_PATHS, Access
from gpufn_gateway.console.handler import Console
from gpufn_gateway.console.sign_ins import PATH as CONSOLE_PATH
from gpufn_gateway.console.sign_ins import SESSION
from gpufn_gateway.http import request_id, sender
from gpufn_gateway.http.body_reader import ClientDisconnected, Receive, Scope, Send
from gpufn_gateway.http.connection.address_rate import AddressRate
from gpufn_gateway.http.connection.uvicorn_protocol import MAX_HEADERS
from gpufn_gateway.http.responses import GPUFN_FORMAT, ResponseFormat, send_problem
from gpufn_gateway.http.turns import Turns
from gpufn_gateway.oip import inference as oip
from gpufn_gateway.oip.inference import Inference
from gpufn_gateway.problems import RouteError
from gpufn_gateway.protocols.adapter import Adapter
from gpufn_gateway.protocols.registration import Protocols, with_api_key
from gpufn_gateway.routes.calls.invoke import Invoke
from gpufn_gateway.routes.requests import CHECK_KEY, TURNS
from gpufn_gateway.store_sync import StoreSync
from gpufn_gateway.terminals import terminals as terminal_paths
from gpufn_gateway.terminals.terminals import Terminals
from gpufn_gateway.web.apps import WebApps
from gpufn_gateway.web.headers import NOT_STORED
from gpufn_gateway.web.socket import refuse

log = logging.getLogger(__name__)

_CONSOLE: Final = f"{CONSOLE_PATH}/"
_FUNCTIONS: Final = "/v1/functions/"
_INVOKE: Final = "/invoke"
_SUBMIT: Final = "/submit"
_READING: Final = frozenset({"GET", "HEAD", "OPTIONS"})
_STORING: Final = frozenset({"POST", "PUT"})
_CALL_PATHS: Final = ("/v1/invocations/", "/v1/dlq/")
_SCANS_AT_ONCE: Final = 2  # by a sender: they keep the event loop busy
_VERB_LENGTH: Final = len(_INVOKE)  # same as len(_SUBMIT)
_STOPPED: Final = (
    "The gateway stopped before this request was done. The call may have run: retry it, with an Idempotency-Key if it "
    "must not run twice."
)

_Handler = Callable[[str, Scope, Receive, Send], Awaitable[None]]


class App:
    def __init__(
        self,
        invoke: Invoke,
        inference: Inference,
        access: Access,
        routes: Sequence[Route],
        disk: StoreSync,
        *,
        audit: RequestAudit,
        address_rate: AddressRate | None = None,
        protocols: Protocols | None = None,
        web: WebApps | None = None,
        terminals: Terminals | None = None,
        console: Console | None = None,
    ) -> None:
        self._calls: dict[str, _Handler] = {_INVOKE: invoke.serve, _SUBMIT: invoke.submit}
        self._inference = inference
        self._access = access
        self._disk = disk
        self._audit = audit
        self._address_rate = address_rate
        self._web = web
        self._console = console
        self._turns = Turns(_SCANS_AT_ONCE)
        self._terminals = terminals
        self._protocols = protocols or Protocols()
        # The first route that matches is used: an adapter cannot replace a native one.
        self._routes = [*routes, *self._protocols.routes()]
        self._router = Router(self._routes, redirect_slashes=False)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._serve_socket(scope, receive, send)
            return
        path: str = scope["path"]
        request_id.current.set(scope.get(request_id.SCOPE_KEY, b"").decode())
        try:
            if self._address_rate is not None:
                self._check_rate(self._address_rate, scope)
            if len(scope["headers"]) > MAX_HEADERS:
                raise RouteError(431, f"A request may have at most {MAX_HEADERS} headers.")
            if self._console is not None and (path == CONSOLE_PATH or path.startswith(_CONSOLE)):
                of_api = await self._console.enter(scope, receive, send)
                if of_api is None:
                    return
                scope, path = of_api, of_api["path"]
            if (call := self._call_at(path)) is None:
                await self._serve(path, scope, receive, send)
            elif scope["method"] == "POST":
                handler, name = call
                await handler(name, scope, receive, send)
            else:
                raise _not_allowed(scope, {"POST"})
        except ClientDisconnected:
            return
        except asyncio.CancelledError:  # cancelled by the server at the end of the shutdown timeout
            await self._send_problem(GatewayUnavailable(_STOPPED), scope, send)
        except Exception as error:
            await self._send_problem(error, scope, send)

    def _call_at(self, path: str) -> tuple[_Handler, str] | None:
        """Return the handler of an invoke or a submit, and the name of its function; None for other paths."""
        if path.startswith(_FUNCTIONS) and (handler := self._calls.get(path[-_VERB_LENGTH:])) is not None:
            name = path[len(_FUNCTIONS) : -_VERB_LENGTH]
            if name and ("/" not in name or names.IN_PATH.fullmatch(name)):
                return handler, name
        return None

    async def _serve(self, path: str, scope: Scope, receive: Receive, send: Send) -> None:
        if (model_and_version := oip.parse_inference_path(path)) is not None:
            if scope["method"] != "POST":
                raise _not_allowed(scope, {"POST"})
            await self._inference.serve(*model_and_version, scope, receive, send)
            return
        if self._web is not None and path.startswith(web_spec.PREFIX):
            await self._web.serve(scope, receive, send)
            return
        await self._route(path, scope, receive, send)

    async def _serve_socket(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a WebSocket: a terminal, or one of a web function."""
        headers = dict(scope["headers"])
        request_id.current.set(request_id.of(headers).decode())
        if self._web is None:
            raise RuntimeError(f"this application does not speak {scope['type']}")
        try:
            if self._address_rate is not None:
                self._check_rate(self._address_rate, scope)
        except GpufnError as error:
            await refuse(error, send)
            return
        if self._terminals is not None and (name := terminal_paths.function_in(scope["path"])) is not None:
            await self._terminals.serve_socket(name, scope, receive, send)
        else:
            await self._web.serve_socket(scope, receive, send)

    def _check_rate(self, limit: AddressRate, scope: Scope) -> None:
        """Raises RateLimited if the client's address has sent too many requests."""
        client = scope.get("client")
        if client and (wait_s := limit.wait_s(client[0], time.monotonic())):
            raise RateLimited(f"Your address may send {limit.rate:g} requests per second.", retry_after_s=wait_s)

    async def _route(self, path: str, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] not in METHODS:
            raise _not_allowed(scope, self._methods_at(scope) or METHODS)
        if (adapter := self._protocols.at(path)) is not None:
            scope = with_api_key(scope, adapter)
        if path not in OPEN_PATHS:  # probes send no key, and often another Host
            headers = dict(scope["headers"])
            scope["gpufn.principal"] = principal = self._access.authenticate(headers)
            own = self._access.sender_of(principal)
            sender.current.set(own)
            scope[TURNS] = self._turns.of(own)
            scope[CHECK_KEY] = functools.partial(self._access.check_unchanged, headers, principal)
        scope["app"] = self  # makes Starlette raise its errors instead of responding
        if scope["method"] in _STORING:
            self._disk.check_room()
        if scope["method"] in _READING:
            await self._run_route(scope, receive, send)
            return
        template = self._template_of(scope)
        send = self._send_after_sync(path, adapter, send)
        audited = is_audited(scope["method"], template) if adapter is None else template in adapter.audited
        if audited:
            await self._run_audited(template, scope, receive, send)
        else:
            await self._run_route(scope, receive, send)

    async def _run_route(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._router(scope, receive, send)
        except HTTPException as error:
            if error.status_code == 405:
                raise _not_allowed(scope, self._methods_at(scope)) from None
            reason = "There is nothing at this path." if error.status_code == 404 else str(error.detail)
            raise RouteError(error.status_code, reason) from None

    async def _run_audited(self, template: str, scope: Scope, receive: Receive, send: Send) -> None:
        """Run a route whose effect is recorded before its response starts."""
        self._audit.check_writable()

        async def send_after_record(event: MutableMapping[str, Any]) -> None:
            if event["type"] == "http.response.start":
                await self._audit.record(scope, template, event["status"], "")
            await send(event)

        try:
            await self._run_route(scope, receive, send_after_record)
        except GpufnError as error:
            problem = problems.problem_of(error)
            if problem.status not in REFUSALS:
                await self._audit.record(scope, template, problem.status, problem.info.code)
            raise

    def _template_of(self, scope: Scope) -> str:
        """Return the path of the route that a request matches, as `/v1/keys/{id}`; "" if none does."""
        matches = (route for route in self._routes if route.matches(scope)[0] is Match.FULL)
        route = next(matches, None)
        return "" if route is None else route.path_format

    def _send_after_sync(self, path: str, adapter: Adapter | None, send: Send) -> Send:
        """Wrap `send` so that a successful response starts only after the data it reports is on disk."""
        sync = self._disk.sync_calls if adapter is not None or _is_call_path(path) else self._disk.sync_records

        async def send_after_sync(event: MutableMapping[str, Any]) -> None:
            if event["type"] == "http.response.start" and event["status"] < 400:
                await sync()
            await send(event)

        return send_after_sync

    def _shown_path(self, scope: Scope) -> str:
        """Return the route of a refused request. The hot path has no routes."""
        path: str = scope["path"]
        if path == SESSION or path.startswith(_CONSOLE):
            return SESSION if path == SESSION else CONSOLE_PATH
        for verb in self._calls:
            if path.startswith(_FUNCTIONS) and path.endswith(verb):
                return f"{_FUNCTIONS}{{fn}}{verb}"
        if oip.parse_inference_path(path) is not None:
            return "/v2/models/{model}/infer"
        return self._template_of(scope) or "unknown"

    def _methods_at(self, scope: Scope) -> set[str]:
        """Return the methods of all routes that match this path; Starlette reports the methods of the first match only.

        Only the matches with the fewest parameters count: /v1/dlq/f/replay also matches /v1/dlq/{fn}/{id}.
        """
        matching = [route for route in self._routes if route.matches(scope)[0] is not Match.NONE]
        fewest = min((len(route.param_convertors) for route in matching), default=0)
        return set[str]().union(*(route.methods or () for route in matching if len(route.param_convertors) == fewest))

    def _format_of(self, path: str) -> ResponseFormat:
        if (adapter := self._protocols.at(path)) is not None:
            return adapter.errors
        return oip.OIP_FORMAT if path == oip.PREFIX or path.startswith(f"{oip.PREFIX}/") else GPUFN_FORMAT

    async def _send_problem(self, error: Exception, scope: Scope, send: Send) -> None:
        problem = problems.problem_of(error)
        if problem.status in REFUSALS:
            self._audit.refuse(scope, self._shown_path(scope), problem.status, problem.info.code)
        try:
            extra = NOT_STORED if scope["path"].startswith(web_spec.PREFIX) else None
            await send_problem(send, self._format_of(scope["path"]), problem, extra)
        except RuntimeError:  # the response has started: the server closes the connection, so the client sees the cut
            if not isinstance(error, GpufnError):
                raise RuntimeError("a response was cut short; the log has the incident") from None


def _is_call_path(path: str) -> bool:
    """True if requests at this path change calls. GPUFN_SYNC decides when calls are synced to disk."""
    return path.startswith(_CALL_PATHS) or "/maps/" in path or "/invocations/" in path or path.endswith("/run")


def _not_allowed(scope: Scope, allowed: Set[str]) -> RouteError:
    methods = ", ".join(sorted(allowed))
    return RouteError(405, f"{scope['method']} is not allowed here; use {methods}.", allow=methods)
