"""Settings common to all processes of a node, from environment variables. Each process adds its own."""

from __future__ import annotations

import re
import socket
from collections.abc import Mapping
from typing import Final

import msgspec

from gpufn_core.encoding.urls import check_bus
from gpufn_core.errors import GpufnError, InvalidInput, InvalidSpec
from gpufn_core.spec.units import MIN_PROCESS_BYTES, check_least_bytes, parse_bytes
from gpufn_platform.volume_store import address

EXIT_CONFIGURATION: Final = 78  # EX_CONFIG of sysexits.h: another start with the same settings fails the same way

_LONGEST_NODE: Final = 40
_NODE: Final = re.compile(rf"[a-z0-9-]{{1,{_LONGEST_NODE}}}")
_INTERVAL: Final = re.compile(r"([0-9]{1,6}(?:\.[0-9]{1,3})?)(ms|s|m)")
_UNITS_S: Final = {"ms": 0.001, "s": 1.0, "m": 60.0}
_SHORTEST_SYNC_S: Final = 0.1
_LONGEST_SYNC_S: Final = 600.0
# Writes that no 202 waits for, such as results, are synced every 2 s; `never` keeps nats-server's default of 2 min.
_NAMED_SYNCS: Final = {"always": 2.0, "never": 120.0}
_YES: Final = {"yes": True, "true": True, "on": True, "1": True, "no": False, "false": False, "off": False, "0": False}


class InvalidSetting(GpufnError):
    """An environment variable has an invalid value."""

    code = "invalid_setting"


class Sync(msgspec.Struct, frozen=True):
    """When accepted calls are synced to disk. `waits`: before the 202; otherwise once per interval."""

    text: str
    waits: bool
    interval_s: float

    def __str__(self) -> str:
        return self.text


def volume_store_address(environ: Mapping[str, str]) -> str:
    """Return GPUFN_VOLUME_STORE. Raises InvalidSetting."""
    text = environ.get("GPUFN_VOLUME_STORE", "")
    try:
        return address.checked(text)
    except ValueError as error:
        raise InvalidSetting(f"GPUFN_VOLUME_STORE={text[:100]!r}: {error}") from error


def parse_sync(text: str) -> Sync:
    """Parse GPUFN_SYNC. Raises ValueError.

    >>> parse_sync("always").waits, parse_sync("500ms").interval_s, parse_sync("never").interval_s
    (True, 0.5, 120.0)
    """
    if text in _NAMED_SYNCS:
        return Sync(text, text == "always", _NAMED_SYNCS[text])
    matched = _INTERVAL.fullmatch(text)
    seconds = 0.0 if matched is None else float(matched[1]) * _UNITS_S[matched[2]]
    if not _SHORTEST_SYNC_S <= seconds <= _LONGEST_SYNC_S:
        raise ValueError("write always, never, or an interval from 100ms to 10m, such as 2s")
    return Sync(text, waits=False, interval_s=seconds)


SYNC: Final = parse_sync("2s")  # the default; `always` halves the call rate, which most calls do not justify


def sync_setting(environ: Mapping[str, str]) -> Sync:
    """Read GPUFN_SYNC. Raises InvalidSetting."""
    text = environ.get("GPUFN_SYNC", "").strip()
    try:
        return parse_sync(text) if text else SYNC
    except ValueError as error:
        raise InvalidSetting(f"GPUFN_SYNC={text!r}: {error}") from error


def bus_url(environ: Mapping[str, str]) -> str:
    """Read GPUFN_NATS_URL: the bus's URL with credentials. Raises InvalidSetting if it is missing or not a URL."""
    if not (url := environ.get("GPUFN_NATS_URL", "")):
        raise InvalidSetting("GPUFN_NATS_URL is not set: set the bus's URL, such as nats://agent:...@host:4222.")
    try:
        check_bus(url)
    except InvalidInput as error:
        raise InvalidSetting(f"GPUFN_NATS_URL: {error.message}.") from error
    return url


def node_name(environ: Mapping[str, str]) -> str:
    """Read GPUFN_NODE: this node's name, one token of a subject; default: the host name. Raises InvalidSetting."""
    if name := environ.get("GPUFN_NODE", ""):
        if _NODE.fullmatch(name) is None:
            raise InvalidSetting(
                f"GPUFN_NODE={name!r} is not a valid node name: use 1 to {_LONGEST_NODE} of a to z, 0 to 9 and hyphens."
            )
        return name
    host = socket.gethostname().partition(".")[0].lower()
    return re.sub(r"[^a-z0-9]+", "-", host).strip("-")[:_LONGEST_NODE].strip("-") or "local"


def size(variable: str, text: str) -> int:
    """Parse a memory size in bytes. Raises InvalidSetting.

    >>> size("GPUFN_MAX_BODY_BYTES", "64Mi")
    67108864
    """
    try:
        return parse_bytes(text)
    except InvalidSpec as error:
        raise InvalidSetting(f"{variable}: {error.message}.") from error


def process_memory(variable: str, text: str, needed_by: str) -> int:
    """Parse the size of memory that must hold a Python process. Raises InvalidSetting.

    >>> process_memory("GPUFN_BUILD_MEMORY", "512", "a process that compiles")
    Traceback (most recent call last):
    gpufn_platform.process.settings.InvalidSetting: GPUFN_BUILD_MEMORY is 512 bytes, \
and a process that compiles needs at least 16 MiB: write GPUFN_BUILD_MEMORY='512Mi'.
    """
    amount = size(variable, text)
    try:
        check_least_bytes(variable, amount, MIN_PROCESS_BYTES, needed_by)
    except InvalidSpec as error:
        raise InvalidSetting(f"{error.message}.") from error
    return amount


def whole_number(variable: str, text: str, low: int, high: int) -> int:
    """Parse an integer from `low` to `high`. Raises InvalidSetting, also for values like 2.9.

    >>> whole_number("GPUFN_TEMPLATES", "2", 0, 1000)
    2
    """
    if not (text.isascii() and text.isdecimal() and low <= int(text) <= high):
        raise InvalidSetting(f"{variable}={text!r} is not a whole number from {low} to {high}.")
    return int(text)


def yes_or_no(variable: str, text: str) -> bool:
    """Parse a boolean. Raises InvalidSetting.

    >>> yes_or_no("GPUFN_MPS_EXCLUSIVE", "Yes")
    True
    """
    value = _YES.get(text.strip().lower())
    if value is None:
        raise InvalidSetting(f"{variable}={text!r}: write yes or no.")
    return value


def number(name: str, text: str) -> float:
    """Parse a number, zero or more. Raises InvalidSetting."""
    try:
        value = float(text)
    except ValueError:
        raise InvalidSetting(f"{name} must be a number, not {text!r}.") from None
    if not 0 <= value < float("inf"):
        raise InvalidSetting(f"{name} must be zero or more, not {text!r}.")
    return value
