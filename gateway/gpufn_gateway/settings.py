"""The gateway's settings, read from environment variables."""

from __future__ import annotations

import functools
import ipaddress
import os
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar
from urllib.parse import urlsplit

import msgspec

from gpufn_core.encoding.urls import is_issuer
from gpufn_core.protocol import limits
from gpufn_gateway.auth.tokens import MAX_TTL_S, MIN_TTL_S
from gpufn_gateway.http import host_field
from gpufn_platform.process.grace_period import GRACE_S
from gpufn_platform.process.settings import SYNC, InvalidSetting, Sync, number, parse_sync, size, yes_or_no
from gpufn_platform.volume_store import address

T = TypeVar("T")
_OF_PLATFORM = "gpufn"  # names in shared memory that the platform uses itself
_VARIABLES = {"grace_s": "GPUFN_GRACE"}  # shared with the agent


class GatewaySettings(msgspec.Struct, frozen=True, kw_only=True):
    host: str = "127.0.0.1"  # GPUFN_HOST: the address to listen on
    port: int = 8090  # GPUFN_PORT: 0 picks a free one
    tls_cert: str = ""  # GPUFN_TLS_CERT: PEM file of the certificate chain; the gateway serves HTTPS then
    tls_key: str = ""  # GPUFN_TLS_KEY: PEM file of the certificate's private key, without a password
    allowed_hosts: tuple[str, ...] = ()  # GPUFN_ALLOWED_HOSTS: with API keys, serve only these hosts: a.example.org
    nats_url: str = "nats://127.0.0.1:4222"  # GPUFN_NATS_URL: the NATS URL, with credentials
    max_body_bytes: int = limits.REQUEST_BYTES  # GPUFN_MAX_BODY_BYTES: the largest request body
    max_bodies_bytes: int = 256 << 20  # GPUFN_MAX_BODIES_BYTES: all bodies that are being received; beyond it, 503
    max_model_bytes: int = 4 << 30  # GPUFN_MAX_MODEL_BYTES: the largest file of a model or a volume
    max_volume_bytes: int = 64 << 30  # GPUFN_MAX_VOLUME_BYTES: the largest volume, with its kept versions
    volume_store: str = ""  # GPUFN_VOLUME_STORE: files of volumes: s3://bucket/folder; empty means the bus
    max_shared_bodies_bytes: int = 2 << 30  # GPUFN_MAX_SHARED_BODIES_BYTES: all large bodies in flight; beyond it, 503
    max_streams: int = 1000  # GPUFN_MAX_STREAMS: WebSockets and gRPC streams of a team, or of a key without one
    max_connections_per_address: int = 4096  # GPUFN_MAX_CONNECTIONS_PER_ADDRESS: open at a time; beyond it, 503
    max_requests_per_address: float = 0.0  # GPUFN_MAX_REQUESTS_PER_ADDRESS: per second; beyond it, 429; 0: no bound
    shared_memory_prefix: str = ""  # GPUFN_SHARED_MEMORY_PREFIX: how names in /dev/shm of tensors begin; empty: off
    shared_memory_uid: int = -1  # GPUFN_SHARED_MEMORY_UID: the user of clients with shared memory; empty: the gateway's
    shared_memory_networks: tuple[str, ...] = ()  # GPUFN_SHARED_MEMORY_NETWORKS: clients on this host, besides loopback
    body_timeout_s: float = 30.0  # GPUFN_BODY_TIMEOUT_S: time to receive a request body
    grace_s: float = GRACE_S  # GPUFN_GRACE: time that running calls get to finish at shutdown
    shutdown_timeout_s: float = 10.0  # GPUFN_SHUTDOWN_TIMEOUT_S: time that other requests get to finish at shutdown
    kept_revisions: int = 10  # GPUFN_KEPT_REVISIONS: newest revisions to keep for rollback, per function
    share_across_domains: bool = False  # GPUFN_SHARE_ACROSS_DOMAINS: let several trust domains share a GPU
    webhook_networks: tuple[str, ...] = ()  # GPUFN_WEBHOOK_NETWORKS: also allow webhooks to: 10.0.0.0/8,fd00::/8
    sync: Sync = SYNC  # GPUFN_SYNC: when to sync accepted calls to disk: always (before 202), 2s, never
    nats_store: str = ""  # GPUFN_NATS_STORE: the data folder of a nats-server on this host; `gpufn up` sets it
    oidc_issuer: str = ""  # GPUFN_OIDC_ISSUER: OpenID provider of `gpufn login`: the exact `iss` of its tokens
    oidc_client_id: str = ""  # GPUFN_OIDC_CLIENT_ID: the client of `gpufn login` at the provider
    oidc_client_secret: str = ""  # GPUFN_OIDC_CLIENT_SECRET: if the provider needs one; each user can read it
    oidc_audience: str = ""  # GPUFN_OIDC_AUDIENCE: the `aud` of the provider's tokens; empty means the client id
    oidc_scopes: str = ""  # GPUFN_OIDC_SCOPES: scopes to request; empty means those that the provider lists
    oidc_groups_claim: str = "groups"  # GPUFN_OIDC_GROUPS_CLAIM: claim with the groups, or its path: realm.roles
    oidc_jwks_url: str = ""  # GPUFN_OIDC_JWKS_URL: the provider's keys, if they are on another host than the issuer
    oidc_ca_file: str = ""  # GPUFN_OIDC_CA_FILE: PEM file of an authority to trust for the provider
    oidc_roles: str = ""  # GPUFN_OIDC_ROLES: TOML or .json file of the scopes of groups and workloads
    token_ttl_s: float = 3600.0  # GPUFN_TOKEN_TTL_S: life of a token, at most 12 h
    prices: str = ""  # GPUFN_PRICES: TOML file of the prices of GPU and CPU hours, and of the budgets
    logs_url: str = ""  # GPUFN_LOGS_URL: the collector's OTLP/HTTP address for logs: http://host:4318/v1/logs
    traces_url: str = ""  # GPUFN_TRACES_URL: the collector's OTLP/HTTP address: http://host:4318/v1/traces
    traces_ratio: float = 0.0  # GPUFN_TRACES_RATIO: share of calls to trace, from 0 to 1, if the client does not decide
    traces_slow_s: float = 0.0  # GPUFN_TRACES_SLOW_S: record calls that take this long, or fail; 0: no such time
    log_level: str = "INFO"  # GPUFN_LOG_LEVEL: DEBUG, INFO, WARNING or ERROR

    @classmethod
    def from_env(cls, environ: Mapping[str, str] = os.environ) -> GatewaySettings:
        """Read the settings. Raises InvalidSetting with the name of the variable."""
        values: dict[str, Any] = {}
        for field in msgspec.structs.fields(cls):
            variable = _VARIABLES.get(field.name) or f"GPUFN_{field.name.upper()}"
            text = environ.get(variable, "").strip()
            if text:
                values[field.name] = _read(variable, text, field)
        if "sync" in values and "nats_store" not in values:
            raise InvalidSetting(
                "GPUFN_SYNC works only with the nats-server of `gpufn up`. For your own NATS servers, set "
                "sync_interval in their configuration."
            )
        if ("tls_cert" in values) != ("tls_key" in values):
            raise InvalidSetting("Set both GPUFN_TLS_CERT and GPUFN_TLS_KEY, or neither.")
        if "oidc_issuer" in values and not {"oidc_client_id", "oidc_roles"} <= values.keys():
            raise InvalidSetting("GPUFN_OIDC_ISSUER also needs GPUFN_OIDC_CLIENT_ID and GPUFN_OIDC_ROLES.")
        return cls(**values)

    @property
    def traces(self) -> bool:
        """Whether calls are traced: any of the settings of traces is set."""
        return bool(self.traces_url or self.traces_ratio or self.traces_slow_s)

    def max_call_bytes(self, max_payload: int) -> int:
        """Return the largest body that an invocation message can carry. `max_payload` is the bus's limit in bytes."""
        return min(self.max_body_bytes, limits.inline_bytes(max_payload))


def _port(text: str) -> int:
    if not (text.isdecimal() and int(text) <= 65535):
        raise ValueError("a port must be a number from 0 to 65535")
    return int(text)


def _positive(kind: Callable[[str], T]) -> Callable[[str], T]:
    expected = "it must be a positive integer" if kind is int else "it must be a positive number"

    def read(text: str) -> T:
        try:
            value = kind(text)
        except ValueError:
            raise ValueError(expected) from None
        if not 0 < value < float("inf"):  # type: ignore[operator]
            raise ValueError(expected)
        return value

    return read


def _issuer(text: str) -> str:
    if not is_issuer(text):
        raise ValueError("use an https address without a query (http only on 127.0.0.1)")
    return text


def _collector(example: str, text: str) -> str:
    parts = urlsplit(text)
    if parts.scheme not in ("http", "https") or not parts.hostname or not parts.path.strip("/"):
        raise ValueError(f"use the full address, with its path: {example}")
    return text


def _ratio(text: str) -> float:
    value = number("GPUFN_TRACES_RATIO", text)
    if value > 1:
        raise ValueError("it must be from 0 to 1")
    return value


def _token_ttl(text: str) -> float:
    value = _positive(float)(text)
    if not MIN_TTL_S <= value <= MAX_TTL_S:
        raise ValueError(f"it must be from {MIN_TTL_S:g} to {MAX_TTL_S:g} seconds")
    return value


def _shared_memory_prefix(text: str) -> str:
    is_of_platform = text.startswith(_OF_PLATFORM) or _OF_PLATFORM.startswith(text)
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]{3,63}", text) or is_of_platform:
        raise ValueError(f"use 4 to 64 letters, digits, '.', '_' and '-', and do not begin with {_OF_PLATFORM!r}")
    return text


def _uid(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) <= 10):
        raise ValueError("use the number of a user, as `id -u` prints it")
    return int(text)


def _networks(text: str) -> tuple[str, ...]:
    return tuple(str(ipaddress.ip_network(each.strip())) for each in text.split(","))


def _hosts(text: str) -> tuple[str, ...]:
    hosts = [host_field.parse(each.strip().encode()) for each in text.split(",")]
    if any(each is None or not each.host or each.port is not None for each in hosts):
        raise ValueError("use host names or addresses without a port, separated by commas")
    return tuple(each.host for each in hosts if each is not None)


def _level(text: str) -> str:
    if text.upper() not in ("DEBUG", "INFO", "WARNING", "ERROR"):
        raise ValueError("use DEBUG, INFO, WARNING or ERROR")
    return text.upper()


_PARSER_BY_TYPE: dict[type, Callable[[str], Any]] = {float: _positive(float), int: _positive(int), str: str}
_PARSER_BY_FIELD: dict[str, Callable[[str], Any]] = {
    "allowed_hosts": _hosts,
    "grace_s": functools.partial(number, "GPUFN_GRACE"),
    "oidc_issuer": _issuer,
    "oidc_jwks_url": _issuer,
    "port": _port,
    "shared_memory_networks": _networks,
    "shared_memory_prefix": _shared_memory_prefix,
    "shared_memory_uid": _uid,
    "token_ttl_s": _token_ttl,
    "traces_ratio": _ratio,
    "traces_slow_s": functools.partial(number, "GPUFN_TRACES_SLOW_S"),
    "logs_url": functools.partial(_collector, "http://host:4318/v1/logs"),
    "traces_url": functools.partial(_collector, "http://host:4318/v1/traces"),
    "volume_store": address.checked,
    "webhook_networks": _networks,
    "log_level": _level,
    "sync": parse_sync,
}


def _read(variable: str, text: str, field: msgspec.structs.FieldInfo) -> Any:
    if field.name.endswith("_bytes"):
        return size(variable, text)
    if field.type is bool:
        return yes_or_no(variable, text)
    try:
        return (_PARSER_BY_FIELD.get(field.name) or _PARSER_BY_TYPE[field.type])(text)
    except ValueError as error:
        raise InvalidSetting(f"{variable}={text!r}: {error}") from error
