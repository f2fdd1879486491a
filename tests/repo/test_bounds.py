"""The page of bounds has every bound that the code has."""

from __future__ import annotations

import re

import msgspec

from gpufn_gateway.settings import GatewaySettings
from tests.conftest import ROOT

_TEMPLATE = (ROOT / "scripts" / "bounds.template").read_text()
_SETTINGS = {f"GPUFN_{field.name.upper()}" for field in msgspec.structs.fields(GatewaySettings)}
# Constants that bound no client: a window of time for our own processes, or the pace of a response.
_INTERNAL = {
    "sender:_IDLE_S",
    "sender:_TRY_S",
    "retry_policy:_DUE_S",
    "retry_policy:_DELAYS_S",
    "concurrency:RETRY_AFTER_S",
    "concurrency:MIN_INTERVAL_S",
}
_INTERNAL |= {
    "deliveries:_TICK_S",
    "deliveries:_ACK_WAIT_S",
    "deliveries:_RECORD_WAIT_S",
    "write_coalescing:_MAX_JOINED_BYTES",
}
_BOUND = re.compile(r"^(_?(?:MAX_[A-Z_]+|[A-Z_]+_(?:S|BYTES|TIMEOUT_S)))(?:: Final)? = [\d(]", re.MULTILINE)


def test_each_setting_that_bounds_something_is_on_the_page() -> None:
    named = {name for name in _SETTINGS if re.match("GPUFN_(MAX_|KEPT_)", name) or name.endswith("_TIMEOUT_S")}
    assert len(named) > 6
    assert {name for name in named if f"{{{name}}}" not in _TEMPLATE} == set()


def test_each_bound_of_connections_and_webhooks_is_on_the_page() -> None:
    paths = [
        path
        for folder in ("http/connection", "webhooks")
        for path in sorted((ROOT / "gateway" / "gpufn_gateway" / folder).glob("*.py"))
    ]
    found = {f"{path.stem}:{name}" for path in paths for name in _BOUND.findall(path.read_text())}
    assert "minimum_rate:HEAD_S" in found
    assert {name for name in found - _INTERNAL if f".{name}}}" not in _TEMPLATE} == set()
