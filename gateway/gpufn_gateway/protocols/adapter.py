"""The base class of adapters: one per protocol, registered by an entry point of the group `gpufn.protocols`."""

from __future__ import annotations

import abc
from collections.abc import Mapping
from typing import ClassVar

from starlette.routing import Route

from gpufn_gateway.http.responses import ResponseFormat
from gpufn_gateway.protocols.platform import Platform


class Adapter(abc.ABC):
    """Translates the requests and responses of one protocol. The entry point is the subclass.

    Native routes come first, so an adapter cannot replace one.
    """

    errors: ClassVar[ResponseFormat]  # the form of every error at the adapter's paths, also of 401 and 404

    def __init__(self, platform: Platform) -> None:
        self.platform = platform

    @abc.abstractmethod
    def owns(self, path: str) -> bool:
        """Return whether a path belongs to this protocol."""

    @abc.abstractmethod
    def routes(self) -> list[Route]:
        """Return the routes, for paths that the adapter owns."""

    def api_key(self, headers: Mapping[bytes, bytes]) -> bytes | None:
        """Return the API key of a client that does not send it as `Authorization: Bearer`; else None."""
        return None
    audited: ClassVar[frozenset[str]] = frozenset()  # paths of the routes that do more than make, end or feed calls
