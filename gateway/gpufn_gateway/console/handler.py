"""Requests below `/console`.

/console/static/...   files, without a session
/console/session      begins and ends a session, as /console/login does (`gpufn_gateway.console.sign_ins`)
/console/api/...      the API, with the session instead of a key
every other path      the document; its script shows the page of the path
"""

from __future__ import annotations

from typing import Final

from gpufn_gateway.auth.access import Access
from gpufn_gateway.console.respond import respond
from gpufn_gateway.console.sessions import Sessions, comes_from_elsewhere, cookie_in
from gpufn_gateway.console.sign_ins import PATH, SignIns
from gpufn_gateway.console.site import DOCUMENT_HEADERS, STATIC, Site
from gpufn_gateway.http.body_reader import Receive, Scope, Send
from gpufn_gateway.problems import RouteError

_API: Final = f"{PATH}/api"


class Console:
    def __init__(self, access: Access, sessions: Sessions, sign_ins: SignIns, site: Site) -> None:
        self._access = access
        self._sessions = sessions
        self._sign_ins = sign_ins
        self._site = site

    async def enter(self, scope: Scope, receive: Receive, send: Send) -> Scope | None:
        """Respond to a request for the console, or return the request for the API that it stands for. Raises
        GpufnError."""
        path: str = scope["path"]
        headers: dict[bytes, bytes] = dict(scope["headers"])
        self._access.check_address(headers)
        if path.startswith(f"{_API}/"):
            return self._sessions.to_api(scope, path.removeprefix(_API))
        if await self._sign_ins.serve(scope, headers, receive, send):
            return None
        if scope["method"] not in ("GET", "HEAD"):
            raise RouteError(405, "The pages of the console can only be read.", allow="GET, HEAD")
        if path.startswith(STATIC):
            fields, body = self._site.static(path, headers)
        elif comes_from_elsewhere(headers) and not cookie_in(headers):
            fields, body = DOCUMENT_HEADERS, self._site.reloading()
        else:
            fields, body = DOCUMENT_HEADERS, self._site.document(await self._sessions.page_token(headers))
        await respond(send, 200, fields, b"" if scope["method"] == "HEAD" else body, length=len(body))
        return None
