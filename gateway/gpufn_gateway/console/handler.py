"""Requests below `/console`.

/console/static/...   files, without a session
/console/session      POST signs in, DELETE signs out
/console/api/...      the API, with the session instead of a key
every other path      the document; its script shows the page of the path
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec

from gpufn_core.encoding import media
from gpufn_gateway.arguments.json_body import decode_json
from gpufn_gateway.audit.request_audit import RequestAudit, add_details
from gpufn_gateway.auth.access import Access
from gpufn_gateway.console.sessions import Sessions, comes_from_elsewhere, cookie_in, set_cookie
from gpufn_gateway.console.site import DOCUMENT_HEADERS, STATIC, Site
from gpufn_gateway.console.tickets import Tickets
from gpufn_gateway.http.body_reader import BodyReader, Receive, Scope, Send
from gpufn_gateway.problems import Headers, RouteError

PATH: Final = "/console"
_API: Final = f"{PATH}/api"
SESSION: Final = f"{PATH}/session"


class SignIn(msgspec.Struct, forbid_unknown_fields=True):
    """An API key or a token (`key`), or a ticket of `gpufn console`."""

    key: str = ""
    ticket: str = ""


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
    ) -> None:
        self._access = access
        self._audit = audit
        self._sessions = sessions
        self._tickets = tickets
        self._bodies = bodies
        self._site = site

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


async def _send(send: Send, status: int, headers: Headers, body: bytes, *, length: int | None = None) -> None:
    size = (b"content-length", b"%d" % (len(body) if length is None else length))
    await send({"type": "http.response.start", "status": status, "headers": [*headers, size]})
    await send({"type": "http.response.body", "body": body})
