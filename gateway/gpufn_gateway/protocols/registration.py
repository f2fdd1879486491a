"""The adapters of this installation, and the adapter of a path."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Sequence
from typing import Final

from starlette.routing import Route

from gpufn_gateway.http.body_reader import Scope
from gpufn_gateway.protocols.adapter import Adapter
from gpufn_gateway.protocols.platform import Platform
from gpufn_gateway.webhooks.payload import EncodePayload

GROUP: Final = "gpufn.protocols"
_AUTHORIZATION: Final = b"authorization"


class Protocols:
    def __init__(self, adapters: Sequence[Adapter] = ()) -> None:
        self._adapters = tuple(adapters)

    def at(self, path: str) -> Adapter | None:
        """Return the adapter that owns a path, or None for a path of the gateway itself."""
        return next((adapter for adapter in self._adapters if adapter.owns(path)), None)

    def routes(self) -> list[Route]:
        return [route for adapter in self._adapters for route in adapter.routes()]

    def webhook_payloads(self) -> dict[str, EncodePayload]:
        """Return the payloads of webhooks, by `Webhook.form`."""
        return {form: encode for adapter in self._adapters for form, encode in adapter.webhooks.items()}


def installed(platform: Platform) -> Protocols:
    """Load the adapters, in the order of their names. Raises the exception of an adapter that cannot be loaded."""
    points = sorted(importlib.metadata.entry_points(group=GROUP), key=lambda point: point.name)
    return Protocols([point.load()(platform) for point in points])


def with_api_key(scope: Scope, adapter: Adapter) -> Scope:
    """Return a request with its API key where the gateway expects it."""
    key = adapter.api_key(dict(scope["headers"]))
    if key is None:
        return scope
    others = [header for header in scope["headers"] if header[0] != _AUTHORIZATION]
    return {**scope, "headers": [*others, (_AUTHORIZATION, b"Bearer " + key)]}
