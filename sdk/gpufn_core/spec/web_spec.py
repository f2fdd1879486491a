"""How a function serves its own HTTP requests, at `/web/{env}/{app}/{function}/`. Pure."""

from __future__ import annotations

import enum
import re

import msgspec

from gpufn_core.errors import InvalidSpec
from gpufn_core.spec.naming.names import parts_of

PREFIX = "/web/"
METHOD = re.compile(r"[A-Z]{1,20}")
_NOT_SERVED = frozenset({"CONNECT", "TRACE"})


class WebKind(enum.StrEnum):
    """ASGI, WSGI: the function returns an application. ENDPOINT: it is called with the arguments of the request."""

    ASGI = "asgi"
    WSGI = "wsgi"
    ENDPOINT = "endpoint"


class WebSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`public`: no API key is needed. `methods`: the HTTP methods of an endpoint."""

    kind: WebKind
    public: bool = False
    methods: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for method in self.methods:
            if METHOD.fullmatch(method) is None or method in _NOT_SERVED:
                raise InvalidSpec(f"methods: {method[:40]!r} is not an HTTP method that an endpoint can serve")
        if (self.kind is WebKind.ENDPOINT) is not bool(self.methods):
            raise InvalidSpec("methods: an endpoint needs at least one HTTP method, and only an endpoint has them")

    @property
    def is_app(self) -> bool:
        """True if the function returns an application: then it cannot be called."""
        return self.kind is not WebKind.ENDPOINT


def root_path(function: str) -> str:
    """Return the path under which a function serves requests, without a slash at its end.

    >>> root_path("prod/shop/site"), root_path("site")
    ('/web/prod/shop/site', '/web/default/default/site')
    """
    return PREFIX + "/".join(parts_of(function))
