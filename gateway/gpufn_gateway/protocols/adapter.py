"""The base class of adapters: one per protocol, registered by an entry point of the group `gpufn.protocols`."""

from __future__ import annotations

import abc
from collections.abc import Mapping
from typing import ClassVar

import msgspec
from starlette.routing import Route

from gpufn_core.encoding import media
from gpufn_gateway.http.responses import GPUFN_FORMAT, ResponseFormat
from gpufn_gateway.problems import Headers, Problem
from gpufn_gateway.protocols.platform import Platform
from gpufn_gateway.webhooks.payload import EncodePayload


class JsonErrors(abc.ABC):
    """Response format of a protocol whose errors are JSON. Results are as in the gpufn API."""

    statuses: ClassVar[Mapping[int, int]] = {}  # native status -> status of the protocol, where they differ

    result = staticmethod(GPUFN_FORMAT.result)

    @abc.abstractmethod
    def body(self, problem: Problem) -> object:
        """Return the body of an error, before it is encoded."""

    def refusal(self, problem: Problem) -> tuple[int, Headers, bytes]:
        headers = [header for header in problem.headers() if header[0] != b"content-type"]
        headers.append((b"content-type", media.JSON.encode()))
        return self.statuses.get(problem.status, problem.status), headers, msgspec.json.encode(self.body(problem))


class Adapter(abc.ABC):
    """Translates the requests and responses of one protocol. The entry point is the subclass.

    Native routes come first, so an adapter cannot replace one.
    """

    errors: ClassVar[ResponseFormat]  # the form of every error at the adapter's paths, also of 401 and 404
    audited: ClassVar[frozenset[str]] = frozenset()  # paths of the routes that do more than make, end or feed calls
    webhooks: ClassVar[Mapping[str, EncodePayload]] = {}  # payloads of its webhooks, by `CallOptions.webhook_form`

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
