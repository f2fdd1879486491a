"""Requests that begin and end sessions of the console: with a key, a ticket, or a login at the OpenID provider.

/console/session          POST signs in, DELETE signs out
/console/login            POST returns the address of the provider
/console/login/callback   the provider sends the browser here
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
from gpufn_gateway.console.respond import respond
from gpufn_gateway.console.sessions import Cookie, Sessions, cookie_in, is_navigation, is_secure, set_cookie
from gpufn_gateway.console.tickets import Tickets
from gpufn_gateway.http import host_field
from gpufn_gateway.http.body_reader import BodyReader, Receive, Scope, Send
from gpufn_gateway.problems import Headers, RouteError, problem_of

log = logging.getLogger(__name__)

PATH: Final = "/console"
SESSION: Final = f"{PATH}/session"
# Lax: the provider sends the browser here, and a strict cookie would not come along.
FLOW_COOKIE: Final = Cookie("gpufn_login", LOGIN, "Lax")


class SignIn(msgspec.Struct, forbid_unknown_fields=True):
    """An API key or a token (`key`), or a ticket of `gpufn console`."""

    key: str = ""
    ticket: str = ""


class BeginLogin(msgspec.Struct, forbid_unknown_fields=True):
    """`next` is the page of the console to show after the login."""

    next: str = PATH


class SignIns:
    def __init__(
        self,
        access: Access,
        sessions: Sessions,
        tickets: Tickets,
        bodies: BodyReader,
        *,
        audit: RequestAudit,
        browser_login: BrowserLogin,
    ) -> None:
        self._access = access
        self._audit = audit
        self._sessions = sessions
        self._tickets = tickets
        self._bodies = bodies
        self._browser_login = browser_login

    async def serve(self, scope: Scope, headers: Mapping[bytes, bytes], receive: Receive, send: Send) -> bool:
        """Respond to a request if it begins or ends a session. Return whether it does. Raises GpufnError."""
        path, method = scope["path"], scope["method"]
        if path == SESSION:
            await self._change_session(scope, headers, receive, send)
        elif (path, method) == (LOGIN, "POST"):
            await self._begin_login(scope, headers, receive, send)
        elif (path, method) == (CALLBACK, "GET"):
            await self._end_login(scope, headers, send)
        else:
            return False
        return True

    async def _change_session(self, scope: Scope, headers: Mapping[bytes, bytes], receive: Receive, send: Send) -> None:
        self._sessions.check_page(headers)
        if scope["method"] == "DELETE":
            cookie = set_cookie(headers, scope["scheme"], "", 0)
            await respond(send, 204, [(b"set-cookie", cookie)], b"")
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
        await respond(send, 201, [(b"content-type", media.JSON.encode()), (b"set-cookie", cookie)], answer)

    async def _begin_login(self, scope: Scope, headers: Mapping[bytes, bytes], receive: Receive, send: Send) -> None:
        self._sessions.check_page(headers)
        body = decode_json(await self._bodies.read(headers, receive) or b"{}", BeginLogin)
        url, flow = await self._browser_login.begin(_origin(headers, scope["scheme"]), body.next)
        cookie = set_cookie(headers, scope["scheme"], flow, FLOW_S, FLOW_COOKIE)
        answer = msgspec.json.encode({"url": url})
        await respond(send, 201, [(b"content-type", media.JSON.encode()), (b"set-cookie", cookie)], answer)

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
        await respond(send, 303, fields, b"")


def _origin(headers: Mapping[bytes, bytes], scheme: str) -> str:
    """Return the origin as the browser sees it. Raises RouteError."""
    host = headers.get(b"host", b"")
    if host_field.parse(host) is None or not host:
        raise RouteError(400, "The field Host has no host.")
    return f"{'https' if is_secure(headers, scheme) else 'http'}://{host.decode('ascii')}"
