"""What the gateway takes from its environment."""

from __future__ import annotations

import functools
import ipaddress
import os
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import msgspec

from gpufn_core.protocol import limits
from gpufn_platform.process.grace_period import GRACE_S
from gpufn_platform.process.settings import SYNC, InvalidSetting, Sync, number, size, sync_of, yes_or_no

T = TypeVar("T")
_NAMES = {"grace_s": "GPUFN_GRACE"}  # that of the agent


class GatewaySettings(msgspec.Struct, frozen=True, kw_only=True):
    host: str = "127.0.0.1"  # GPUFN_HOST: the address to listen on
    port: int = 8090  # GPUFN_PORT: 0 picks a free one
    nats_url: str = "nats://127.0.0.1:4222"  # GPUFN_NATS_URL: the bus, with credentials
    max_body_bytes: int = limits.REQUEST_BYTES  # GPUFN_MAX_BODY_BYTES: the largest body of any request
    max_bodies_bytes: int = 256 << 20  # GPUFN_MAX_BODIES_BYTES: of all bodies that are being received; beyond it, 503
    max_model_bytes: int = 4 << 30  # GPUFN_MAX_MODEL_BYTES: the largest file of a model
    max_parcels_bytes: int = 2 << 30  # GPUFN_MAX_PARCELS_BYTES: of all large bodies of calls under way; beyond it, 503
    max_connections_per_address: int = 4096  # GPUFN_MAX_CONNECTIONS_PER_ADDRESS: open at a time; beyond it, 503
    body_timeout_s: float = 30.0  # GPUFN_BODY_TIMEOUT_S: a request's body must be here after so long
    grace_s: float = GRACE_S  # GPUFN_GRACE: calls that run at shutdown may take so long to finish
    shutdown_timeout_s: float = 10.0  # GPUFN_SHUTDOWN_TIMEOUT_S: the like for other requests
    kept_revisions: int = 10  # GPUFN_KEPT_REVISIONS: so many of a function's newest can be rolled back to
    share_across_domains: bool = False  # GPUFN_SHARE_ACROSS_DOMAINS: a GPU may be shared by several trust domains
    webhook_networks: tuple[str, ...] = ()  # GPUFN_WEBHOOK_NETWORKS: webhooks go there as well: 10.0.0.0/8,fd00::/8
    sync: Sync = SYNC  # GPUFN_SYNC: when accepted calls are on the disk: always (before 202), 2s, never
    nats_store: str = ""  # GPUFN_NATS_STORE: the folder of the data of a nats-server on this host; `gpufn up` sets it
    log_level: str = "INFO"  # GPUFN_LOG_LEVEL: DEBUG, INFO, WARNING or ERROR

    @classmethod
    def from_env(cls, environ: Mapping[str, str] = os.environ) -> GatewaySettings:
        """Raises InvalidSetting, which names the variable."""
        given: dict[str, Any] = {}
        for field in msgspec.structs.fields(cls):
            variable = _NAMES.get(field.name) or f"GPUFN_{field.name.upper()}"
            text = environ.get(variable, "").strip()
            if text:
                given[field.name] = _read(variable, text, field)
        if "sync" in given and "nats_store" not in given:
            raise InvalidSetting(
                "GPUFN_SYNC is for the nats-server of `gpufn up`: set sync_interval in your own servers' configuration."
            )
        return cls(**given)

    def max_call_bytes(self, max_payload: int) -> int:
        """The largest body of an invocation, on a bus that takes messages of `max_payload` bytes."""
        return min(self.max_body_bytes, limits.inline_bytes(max_payload))


def _port(text: str) -> int:
    if not (text.isdecimal() and int(text) <= 65535):
        raise ValueError("a port is a number from 0 to 65535")
    return int(text)


def _positive(kind: Callable[[str], T]) -> Callable[[str], T]:
    needed = "a positive whole number is needed" if kind is int else "a positive number is needed"

    def read(text: str) -> T:
        try:
            value = kind(text)
        except ValueError:
            raise ValueError(needed) from None
        if not 0 < value < float("inf"):  # type: ignore[operator]
            raise ValueError(needed)
        return value

    return read


def _networks(text: str) -> tuple[str, ...]:
    return tuple(str(ipaddress.ip_network(each.strip())) for each in text.split(","))


def _level(text: str) -> str:
    if text.upper() not in ("DEBUG", "INFO", "WARNING", "ERROR"):
        raise ValueError("write DEBUG, INFO, WARNING or ERROR")
    return text.upper()


_OF_TYPE: dict[type, Callable[[str], Any]] = {
    float: _positive(float),
    int: _positive(int),
    str: str,
}
_OF_FIELD: dict[str, Callable[[str], Any]] = {
    "grace_s": functools.partial(number, "GPUFN_GRACE"),
    "port": _port,
    "webhook_networks": _networks,
    "log_level": _level,
    "sync": sync_of,
}


def _read(variable: str, text: str, field: msgspec.structs.FieldInfo) -> Any:
    if field.name.endswith("_bytes"):
        return size(variable, text)
    if field.type is bool:
        return yes_or_no(variable, text)
    try:
        return (_OF_FIELD.get(field.name) or _OF_TYPE[field.type])(text)
    except ValueError as error:
        raise InvalidSetting(f"{variable}={text!r}: {error}") from error
