"""Requests below `/console`.

/console/static/...   files, without a session
/console/session      POST signs in, DELETE signs out
/console/login        POST returns the address of the OpenID provider; it sends the browser to /console/login/callback
/console/api/...      the API, with the session instead of a key
every other path      the document; its script shows the page of the path
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Final

import msgspec

from gpufn_core.encoding import media
from gpufn_core.errors import GpufnError
from gpufn_gateway.arguments.json_body import decode_json
from gpufn_gateway.audit.request_audit import REFUSALS, RequestAudit, add_details
from gpufn_gateway.auth.access import Access
from gpufn_gateway.console.browser_login import CALLBACK, FLOW_S, LOGIN, BrowserLogin, LoginExpired, outcome_of
from gpufn_gateway.console.sessions import (
    Cookie,
    Sessions,
    comes_from_elsewhere,
    cookie_in,
    is_navigation,
    is_secure,
    set_cookie,
)
from gpufn_gateway.console.site import DOCUMENT_HEADERS, STATIC, Site
from gpufn_gateway.console.tickets import Tickets
from gpufn_gateway.http import host_field
from gpufn_gateway.http.body_reader import BodyReader, Receive, Scope, Send
from gpufn_gateway.problems import Headers, RouteError, problem_of

log = logging.getLogger(__name__)

PATH: Final = "/console"
_API: Final = f"{PATH}/api"
# Lax: the provider sends the browser here, and a strict cookie would not come along.
FLOW_COOKIE: Final = Cookie("gpufn_login", LOGIN, "Lax")
SESSION: Final = f"{PATH}/session"


class SignIn(msgspec.Struct, forbid_unknown_fields=True):
    """An API key or a token (`key`), or a ticket of `gpufn console`."""

    key: str = ""
    ticket: str = ""


class BeginLogin(msgspec.Struct, forbid_unknown_fields=True):
    """`next` is the page of the console to show after the login."""

    next: str = PATH


class Console:
    def __init__(
        self,
        access: Access,
        sessions: Sessions,
        tickets: Tickets,
        bodies: BodyReader,
        site: Site,
        *,
        audit: RequestAudit,
        browser_login: BrowserLogin,
    ) -> None:
        self._access = access
        self._audit = audit
        self._sessions = sessions
        self._tickets = tickets
        self._bodies = bodies
        self._site = site
        self._browser_login = browser_login

    async def enter(self, scope: Scope, receive: Receive, send: Send) -> Scope | None:
        """Respond to a request for the console, or return the request for the API that it stands for. Raises
        GpufnError."""
        path: str = scope["path"]
        headers: dict[bytes, bytes] = dict(scope["headers"])
        self._access.check_address(headers)
        if path.startswith(f"{_API}/"):
            return self._sessions.to_api(scope, path.removeprefix(_API))
        if path == SESSION:
            await self._change_session(scope, headers, receive, send)
            return None
        if path == LOGIN and scope["method"] == "POST":
            await self._begin_login(scope, headers, receive, send)
            return None
        if path == CALLBACK and scope["method"] == "GET":
            await self._end_login(scope, headers, send)
            return None
        if scope["method"] not in ("GET", "HEAD"):
            raise RouteError(405, "The pages of the console can only be read.", allow="GET, HEAD")
        if path.startswith(STATIC):
            fields, body = self._site.static(path, headers)
        elif comes_from_elsewhere(headers) and not cookie_in(headers):
            fields, body = DOCUMENT_HEADERS, self._site.reloading()
        else:
            fields, body = DOCUMENT_HEADERS, self._site.document(await self._sessions.page_token(headers))
        await _send(send, 200, fields, b"" if scope["method"] == "HEAD" else body, length=len(body))
        return None

    async def _change_session(self, scope: Scope, headers: Mapping[bytes, bytes], receive: Receive, send: Send) -> None:
        self._sessions.check_page(headers)
        if scope["method"] == "DELETE":
            cookie = set_cookie(headers, scope["scheme"], "", 0)
            await _send(send, 204, [(b"set-cookie", cookie)], b"")
            return
        if scope["method"] != "POST":
            raise RouteError(405, "POST signs in, DELETE signs out.", allow="DELETE, POST")
        self._audit.check_writable()
        body = decode_json(await self._bodies.read(headers, receive) or b"{}", SignIn)
        if body.ticket:
            issued = await self._tickets.redeem(body.ticket)
        else:
            issued = await self._sessions.sign_in(headers, body.key)
        scope["gpufn.principal"] = self._access.tokens.authenticate(issued.token.encode())
        add_details(scope, expires_at=issued.expires_at)
        await self._audit.record(scope, SESSION, 201, "")
        cookie = set_cookie(headers, scope["scheme"], issued.token, issued.expires_in_s)
        answer = msgspec.json.encode({"id": issued.id, "name": issued.name, "expires_at": issued.expires_at})
        await _send(send, 201, [(b"content-type", media.JSON.encode()), (b"set-cookie", cookie)], answer)

    async def _begin_login(self, scope: Scope, headers: Mapping[bytes, bytes], receive: Receive, send: Send) -> None:
        self._sessions.check_page(headers)
        body = decode_json(await self._bodies.read(headers, receive) or b"{}", BeginLogin)
        url, flow = await self._browser_login.begin(_origin(headers, scope["scheme"]), body.next)
        cookie = set_cookie(headers, scope["scheme"], flow, FLOW_S, FLOW_COOKIE)
        answer = msgspec.json.encode({"url": url})
        await _send(send, 201, [(b"content-type", media.JSON.encode()), (b"set-cookie", cookie)], answer)

    async def _end_login(self, scope: Scope, headers: Mapping[bytes, bytes], send: Send) -> None:
        """Begin a session, and go to the page from which the login began; after a failure, to the sign-in."""
        fields: Headers = []
        try:
            if not is_navigation(headers):
                raise LoginExpired("Only a navigation of a browser ends a login.")
            self._audit.check_writable()
            flow, parameters = self._browser_login.flow_of(cookie_in(headers, FLOW_COOKIE), scope["query_string"])
            fields.append((b"set-cookie", set_cookie(headers, scope["scheme"], "", 0, FLOW_COOKIE)))
            issued = await self._browser_login.end(flow, parameters)
            scope["gpufn.principal"] = self._access.tokens.authenticate(issued.token.encode())
            add_details(scope, expires_at=issued.expires_at)
            await self._audit.record(scope, CALLBACK, 303, "")
        except GpufnError as error:
            if (status := problem_of(error).status) in REFUSALS:
                self._audit.refuse(scope, CALLBACK, status, error.code)
            outcome = outcome_of(error)
            if outcome not in ("expired", "denied"):  # these two need no login at the provider
                log.warning("a login in the browser failed: %s", error.message)
            location = f"{PATH}#login={outcome}"
        else:
            location = flow.next
            fields.append((b"set-cookie", set_cookie(headers, scope["scheme"], issued.token, issued.expires_in_s)))
        # The browser counts the next request as one of the provider, and sends no strict cookie: `reloading` follows.
        fields += [(b"location", location.encode()), (b"referrer-policy", b"no-referrer")]
        await _send(send, 303, fields, b"")


def _origin(headers: Mapping[bytes, bytes], scheme: str) -> str:
    """Return the origin as the browser sees it. Raises RouteError."""
    host = headers.get(b"host", b"")
    if host_field.parse(host) is None or not host:
        raise RouteError(400, "The field Host has no host.")
    return f"{'https' if is_secure(headers, scheme) else 'http'}://{host.decode('ascii')}"


async def _send(send: Send, status: int, headers: Headers, body: bytes, *, length: int | None = None) -> None:
    size = (b"content-length", b"%d" % (len(body) if length is None else length))
    await send({"type": "http.response.start", "status": status, "headers": [*headers, size]})
    await send({"type": "http.response.body", "body": body})
