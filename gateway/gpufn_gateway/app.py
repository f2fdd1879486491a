"""The ASGI application: the edge every request passes, then the hot path or Starlette's router.

1. methods outside the allow-list and heads with too many headers are refused
2. invoke and submit go straight to `Invoke`, inference to `Inference`
3. everything else is authenticated, then routed
4. whatever was raised before the answer began becomes a problem, in the words of the path's protocol; a foreign
   exception shows only an incident id; what is cut short because the gateway stops is told so
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import MutableMapping, Sequence, Set
from typing import Any, Final

from starlette.exceptions import HTTPException
from starlette.routing import Match, Route, Router

from gpufn_core.errors import GatewayUnavailable, GpufnError
from gpufn_gateway import problems
from gpufn_gateway.auth.access import METHODS, OPEN_PATHS, Access
from gpufn_gateway.http.body_reader import ClientGone, Receive, Scope, Send
from gpufn_gateway.http.responses import OWN, Wording, send_problem
from gpufn_gateway.http.uvicorn_protocol import MAX_HEADERS
from gpufn_gateway.oip import inference as oip
from gpufn_gateway.oip.inference import Inference
from gpufn_gateway.problems import RouteError
from gpufn_gateway.routes.invoke import Invoke
from gpufn_gateway.store_sync import StoreSync

log = logging.getLogger(__name__)

_FUNCTIONS: Final = "/v1/functions/"
_INVOKE: Final = "/invoke"
_SUBMIT: Final = "/submit"
_READING: Final = frozenset({"GET", "HEAD", "OPTIONS"})
_STORING: Final = frozenset({"POST", "PUT"})
_OF_CALLS: Final = ("/v1/invocations/", "/v1/dlq/")
_VERB_LENGTH: Final = len(_INVOKE)  # of both
_STOPPED: Final = (
    "The gateway stopped before this was done, and it may have run: try again, with an Idempotency-Key if it must not "
    "run twice."
)


class App:
    def __init__(
        self, invoke: Invoke, inference: Inference, access: Access, routes: Sequence[Route], disk: StoreSync
    ) -> None:
        self._calls = {_INVOKE: invoke.serve, _SUBMIT: invoke.submit}
        self._inference = inference
        self._access = access
        self._disk = disk
        self._routes = routes
        self._router = Router(routes, redirect_slashes=False)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise RuntimeError(f"this application does not speak {scope['type']}")
        path: str = scope["path"]
        try:
            if len(scope["headers"]) > MAX_HEADERS:
                raise RouteError(431, f"A request has at most {MAX_HEADERS} headers.")
            if path.startswith(_FUNCTIONS) and (call := self._calls.get(path[-_VERB_LENGTH:])) is not None:
                name = path[len(_FUNCTIONS) : -_VERB_LENGTH]
                if name and "/" not in name:
                    if scope["method"] != "POST":
                        raise _not_allowed(scope, {"POST"})
                    await call(name, scope, receive, send)
                    return
            if (asked := oip.inference_of(path)) is not None:
                if scope["method"] != "POST":
                    raise _not_allowed(scope, {"POST"})
                await self._inference.serve(*asked, scope, receive, send)
                return
            await self._route(path, scope, receive, send)
        except ClientGone:
            return
        except asyncio.CancelledError:  # by the server, which ends, and has waited for as long as it may
            await self._refuse(GatewayUnavailable(_STOPPED), scope, send)
        except Exception as error:
            await self._refuse(error, scope, send)

    async def _route(self, path: str, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] not in METHODS:
            raise _not_allowed(scope, self._methods_at(scope) or METHODS)
        if path not in OPEN_PATHS:  # probes have neither a key nor our name
            scope["gpufn.principal"] = self._access.authenticate(dict(scope["headers"]))
        scope["app"] = self  # makes Starlette raise its errors instead of answering them
        if scope["method"] in _STORING:
            self._disk.check_room()
        answer = send if scope["method"] in _READING else self._once_on_disk(path, send)
        try:
            await self._router(scope, receive, answer)
        except HTTPException as error:
            if error.status_code == 405:
                raise _not_allowed(scope, self._methods_at(scope)) from None
            reason = "There is nothing at this path." if error.status_code == 404 else str(error.detail)
            raise RouteError(error.status_code, reason) from None

    def _once_on_disk(self, path: str, send: Send) -> Send:
        """`send`, which begins an answer only when what it is about is on the disk."""
        on_disk = self._disk.accepted if _is_of_calls(path) else self._disk.recorded

        async def once_on_disk(event: MutableMapping[str, Any]) -> None:
            if event["type"] == "http.response.start" and event["status"] < 400:
                await on_disk()
            await send(event)

        return once_on_disk

    def _methods_at(self, scope: Scope) -> set[str]:
        """The methods of all routes with this path; Starlette reports those of the first one only. The routes with the
        fewest parameters count: /v1/dlq/f/replay also matches /v1/dlq/{fn}/{id}."""
        matching = [route for route in self._routes if route.matches(scope)[0] is not Match.NONE]
        least = min((len(route.param_convertors) for route in matching), default=0)
        return set[str]().union(*(route.methods or () for route in matching if len(route.param_convertors) == least))

    async def _refuse(self, error: Exception, scope: Scope, send: Send) -> None:
        problem = problems.problem_of(error)
        try:
            await send_problem(send, _wording(scope["path"]), problem)
        except RuntimeError:  # the answer had begun: the server breaks the connection, which is the truth
            if not isinstance(error, GpufnError):
                raise RuntimeError("an answer broke off; its incident is in the log") from None


def _is_of_calls(path: str) -> bool:
    """Whether a request there is about calls: GPUFN_SYNC says when those are on the disk."""
    return path.startswith(_OF_CALLS) or "/maps/" in path or "/invocations/" in path or path.endswith("/run")


def _wording(path: str) -> Wording:
    return oip.OIP if path == oip.PREFIX or path.startswith(f"{oip.PREFIX}/") else OWN


def _not_allowed(scope: Scope, allowed: Set[str]) -> RouteError:
    listed = ", ".join(sorted(allowed))
    return RouteError(405, f"{scope['method']} is not allowed here; {listed} is.", allow=listed)
