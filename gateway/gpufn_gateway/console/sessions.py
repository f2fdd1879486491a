"""Sessions of the console.

The session cookie holds a token of the gateway (`gpufn_gateway.auth.tokens`). It ends with its API key or user, and
after 12 hours. Only paths below `/console` accept it: the API knows no cookies.

Pages of web functions have the same origin as the console, and their authors may be strangers. So the cookie alone is
not enough. Each request also needs the page token, which is in the console's document and proves that the document sent
it. A browser gives the document only to a navigation: `Sec-Fetch-*`, which scripts cannot set, tells them apart. No
other page can read it, because it is in no cache, no frame, and no window that another page could hold.

A gateway without API keys serves the console of this machine with an empty cookie. It needs the page token too.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
from collections.abc import Mapping
from http.cookies import CookieError, SimpleCookie
from typing import Final, NamedTuple

from gpufn_core.encoding.urls import is_loopback
from gpufn_core.errors import Unauthorized
from gpufn_gateway.auth.access import Access
from gpufn_gateway.auth.login import Issued, Login
from gpufn_gateway.auth.token_store import TokenStore
from gpufn_gateway.auth.tokens import MAX_TTL_S
from gpufn_gateway.http import host_field
from gpufn_gateway.http.body_reader import Scope
from gpufn_gateway.problems import RouteError
from gpufn_gateway.routes.requests import whole_number

PAGE_TOKEN: Final = b"x-gpufn-page"
_MAX_DIGITS: Final = 9  # of the number of a signing key
_SET_BY_SERVER: Final = "__Http-"  # browsers that know this prefix refuse such a cookie of a script
_CONTEXT: Final = b"gpufn console page\0"
_OF_PAGES: Final = (b"authorization", b"cookie", b"origin", b"referer", PAGE_TOKEN)  # not for the API


class Cookie(NamedTuple):
    """A cookie of the console. Browsers share cookies between the ports of a host, so its name gets the port."""

    name: str
    path: str
    same_site: str


SESSION_COOKIE: Final = Cookie("gpufn_console", "/console", "Strict")


class Sessions:
    def __init__(self, access: Access, login: Login, store: TokenStore) -> None:
        self._access = access
        self._login = login
        self._store = store

    async def page_token(self, headers: Mapping[bytes, bytes]) -> str:
        """Return the page token for the document of a session; "" for a request that is no navigation of a browser.

        A browser sends no `Sec-Fetch-*` to an origin that others on the network could forge: HTTP beyond loopback.
        """
        if not is_navigation(headers):
            return ""
        key = await self._store.signing_key()
        return f"{key.number}.{_page_mac(key.secret, cookie_in(headers))}"

    def check_page(self, headers: Mapping[bytes, bytes]) -> None:
        """Raise RouteError unless a document of this session has sent the request."""
        text, _, mac = headers.get(PAGE_TOKEN, b"").decode("latin-1").partition(".")
        number = whole_number(text, _MAX_DIGITS)
        key = None if number is None else self._access.tokens.signing_keys.get(number)
        is_foreign = headers.get(b"sec-fetch-site", b"same-origin") != b"same-origin"
        expected = "" if key is None else _page_mac(key.secret, cookie_in(headers))
        if is_foreign or key is None or not hmac.compare_digest(expected.encode(), mac.encode()):
            raise RouteError(401, "This page of the console is no longer valid: load it again.")

    def to_api(self, scope: Scope, path: str) -> Scope:
        """Return the request for the API that a request of the console stands for. Raises RouteError."""
        headers = dict(scope["headers"])
        self.check_page(headers)
        own = [(name, value) for name, value in scope["headers"] if not _is_of_pages(name)]
        if cookie := cookie_in(headers):
            own.append((b"authorization", b"Bearer " + cookie.encode("latin-1")))
        return {**scope, "path": path, "raw_path": path.encode(), "headers": own}

    async def sign_in(self, headers: Mapping[bytes, bytes], credential: str) -> Issued:
        """Exchange an API key, a token or a ticket for the token of a session. Raises Unauthorized."""
        text = credential.strip()
        if not text.isascii() or " " in text:
            raise Unauthorized("This is no API key and no token: they have no spaces.")
        own = {name: value for name, value in headers.items() if not _is_of_pages(name)}
        own = {name: value for name, value in own.items() if not name.startswith(b"sec-fetch-")}
        own[b"authorization"] = b"Bearer " + text.encode()
        return await self._login.exchange(own, None, MAX_TTL_S)


def is_navigation(headers: Mapping[bytes, bytes]) -> bool:
    """Return whether a browser wants to show the response as a page in a window of its own."""
    is_document = headers.get(b"sec-fetch-dest") == b"document" and headers.get(b"sec-fetch-mode") == b"navigate"
    return is_document and b"sec-purpose" not in headers and b"purpose" not in headers  # no prefetch


def comes_from_elsewhere(headers: Mapping[bytes, bytes]) -> bool:
    """Return whether another site has the link that was followed: then the browser has not sent the cookie."""
    return is_navigation(headers) and headers.get(b"sec-fetch-site") in (b"cross-site", b"same-site")


def cookie_in(headers: Mapping[bytes, bytes], cookie: Cookie = SESSION_COOKIE) -> str:
    """Return the value of a cookie, or ""."""
    try:
        found = SimpleCookie(headers.get(b"cookie", b"").decode("latin-1")).get(_name(headers, cookie))
    except CookieError:
        return ""
    return "" if found is None else found.value


def set_cookie(
    headers: Mapping[bytes, bytes], scheme: str, value: str, max_age_s: float, cookie: Cookie = SESSION_COOKIE
) -> bytes:
    """Return the field that sets a cookie, or with no value removes it."""
    secure = "; Secure" if is_secure(headers, scheme) else ""
    age = int(max_age_s) if value else 0
    limits = f"Path={cookie.path}; Max-Age={age}; HttpOnly; SameSite={cookie.same_site}{secure}"
    return f"{_name(headers, cookie)}={value}; {limits}".encode()


def is_secure(headers: Mapping[bytes, bytes], scheme: str) -> bool:
    """Return whether the browser uses HTTPS. Behind a proxy, TLS ends there; without TLS only loopback is served."""
    authority = host_field.parse(headers.get(b"host", b""))
    return not (scheme == "http" and authority is not None and is_loopback(authority.host))


def _name(headers: Mapping[bytes, bytes], cookie: Cookie) -> str:
    """Return the name of the cookie. Browsers share cookies between the ports of a host, so it has the port. Beyond
    loopback, where it is Secure, the prefix prevents that a script of a web function sets it."""
    authority = host_field.parse(headers.get(b"host", b""))
    prefix = "" if authority is not None and is_loopback(authority.host) else _SET_BY_SERVER
    port = "" if authority is None or authority.port is None else f"_{authority.port}"
    return f"{prefix}{cookie.name}{port}"


def _is_of_pages(name: bytes) -> bool:
    return name in _OF_PAGES or name.startswith(b"sec-")


def _page_mac(secret: bytes, cookie: str) -> str:
    mac = hmac.digest(secret, _CONTEXT + cookie.encode("latin-1"), hashlib.sha256)
    return base64.urlsafe_b64encode(mac).rstrip(b"=").decode()
