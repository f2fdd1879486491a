"""`gpufn keys create`, `rotate`, `limit`, `ls`, `rm`, `reset`, `webhook-secret`."""

from __future__ import annotations

import re
import time
from typing import Any

import click

from gpufn.cli import import_module
from gpufn.cli.terminal.command import (
    Argument,
    FloatRange,
    Group,
    IntRange,
    connect,
    json_option,
    options_together,
    yes_option,
)
from gpufn.cli.terminal.output import ago, confirm, duration, print_json, print_table, say, say_or_json
from gpufn_core.protocol.records import KeyLimits

_RATE = re.compile(r"(?P<calls>\d+(?:\.\d+)?)/(?P<per>s|min|h)")
_DAILY_SECONDS = FloatRange(0.001, 1e9)  # excludes NaN and infinity, which JSON encodes as null (no limit)
_SECONDS = {"s": 1.0, "min": 60.0, "h": 3600.0}
_DURATION_UNITS = {**_SECONDS, "d": 86_400.0}
_RESET_MODULE = "gpufn_local.key_reset"  # part of the platform, which may not be installed on a client

app = Group("keys", help="Create, rotate, limit, list and delete API keys.")

_id_argument = click.argument("id", cls=Argument, help="Id of the key.")
_DURATION = re.compile(r"(?P<count>\d+)(?P<unit>s|min|h|d)")
_limit_options = options_together(
    click.option("--rate", help="Maximum rate of calls, such as 50/s, 600/min or 1000/h."),
    click.option(
        "--burst", type=IntRange(min=1), help="Maximum number of calls at once. Default: the calls of one second."
    ),
    click.option("--concurrency", type=IntRange(min=1), help="Maximum number of synchronous calls in flight."),
    click.option("--queued", type=IntRange(min=1), help="Maximum number of submitted calls that have not ended."),
    click.option(
        "--run-seconds", "run_s", type=_DAILY_SECONDS, help="Maximum run time of its calls in seconds per UTC day."
    ),
    click.option("--gpu-seconds", "gpu_s", type=_DAILY_SECONDS, help="Maximum GPU seconds of its calls per UTC day."),
)


@app.command()
@click.argument("label", cls=Argument, default="", help="Purpose of the key, shown in lists.")
@click.option(
    "--scope",
    multiple=True,
    help="Scope: admin, deploy, read, exec, invoke:*, hi, pickle; or deploy:P, read:P, exec:P or invoke:P for the "
    "functions that the pattern P names: FUNCTION, ENV/*, ENV/APP/*, */APP/* or ENV/APP/FUNCTION. Repeatable. "
    "Default: admin.",
)
@click.option(
    "--team",
    default="",
    help="Team of the key: its scopes hold for the functions of the team. Default scopes: deploy and invoke:*.",
)
@click.option("--expires", help="Time until the gateway rejects the key, such as 30d, 12h or 90min. Default: never.")
@_limit_options
@json_option
def create(
    *, label: str, scope: tuple[str, ...], team: str, expires: str | None, rate: str | None, json: bool, **limits: Any
) -> None:
    """Create a key and print it once. Without --scope and --team the key has every permission.

    While any key exists, every request needs one, from this machine too: set GPUFN_API_KEY. After the last key is
    deleted, requests need no key. If you lost all keys, `gpufn keys reset` deletes them.
    """
    with connect() as client:
        scopes = list(scope) or (["deploy", "invoke:*"] if team else ["admin"])
        expires_in_s = seconds_of(expires)
        key = client.create_key(label, scopes, rate=per_second(rate), expires_in_s=expires_in_s, team=team, **limits)
    if json:
        print_json(key)
    else:
        described = ", ".join(key.scopes) if scope or team else "admin: every permission"
        owner = f" of the team {team}" if team else ""
        say(f"key {key.id}{owner} ({described}); store it, it is not shown again:", err=True)
        say(key.key or "")
    if not client.has_credential:  # with other keys, the request would have needed one
        say("this is the first key: from now on every request needs a key, from this machine too", err=True)
        say("  to use it: export GPUFN_API_KEY=...", err=True)
        say(f"  to undo this, with the key set: gpufn keys rm {key.id}", err=True)


@app.command()
@_id_argument
@click.option("--overlap", help="Time for which the old secret stays valid, such as 24h. Default: none.")
@json_option
def rotate(*, id: str, overlap: str | None, json: bool) -> None:  # noqa: A002
    """Replace the secret of a key and print the new one once. Scopes, limits and usage of the key stay."""
    with connect() as client:
        key = client.rotate_key(id, overlap_s=seconds_of(overlap) or 0.0)
    if json:
        print_json(key)
    else:
        until = "is no longer valid" if overlap is None else f"stays valid for {overlap}"
        say(f"key {key.id}: the old secret {until}; store the new one, it is not shown again:", err=True)
        say(key.key or "")


@app.command()
@_id_argument
@_limit_options
@json_option
def limit(*, id: str, rate: str | None, json: bool, **limits: Any) -> None:  # noqa: A002
    """Replace all limits of a key. Without options, remove its limits."""
    with connect() as client:
        key = client.limit_key(id, rate=per_second(rate), **limits)
    say_or_json(f"key {key.id}: {_limits(key.limits)}", key, json=json)


@app.command("ls")
@json_option
def list_keys(json: bool) -> None:
    """List the keys, without their secrets."""
    with connect() as client:
        keys = client.keys()
    if json:
        print_json(keys)
        return
    rows = [
        (
            key.id,
            key.label,
            key.team,
            ", ".join(key.scopes),
            _limits(key.limits),
            ago(key.created_at),
            "-" if key.last_used_at is None else ago(key.last_used_at),
            _expiry(key.expires_at),
        )
        for key in keys
    ]
    titles = ("id", "label", "team", "scopes", "limits", "created", "last used", "expires")
    print_table(titles, rows, empty="no keys: the gateway serves this machine only")


def _expiry(expires_at: float | None) -> str:
    if expires_at is None:
        return "-"
    remaining_s = expires_at - time.time()
    return f"in {duration(remaining_s)}" if remaining_s > 0 else "expired"


def seconds_of(text: str | None) -> float | None:
    """
    >>> seconds_of("30d"), seconds_of("90min"), seconds_of(None)
    (2592000.0, 5400.0, None)
    """
    if text is None:
        return None
    match = _DURATION.fullmatch(text.strip())
    if match is None:
        raise click.BadParameter(f"{text!r} is not a duration: write for example 30d, 12h or 90min")
    return int(match["count"]) * _DURATION_UNITS[match["unit"]]


def per_second(rate: str | None) -> float | None:
    """
    >>> per_second("50/s"), per_second("90/min"), per_second("1800/h")
    (50.0, 1.5, 0.5)
    """
    if rate is None:
        return None
    match = _RATE.fullmatch(rate.strip())
    if match is None or not float(match["calls"]):
        raise click.BadParameter(f"{rate!r} is not a rate: write for example 50/s, 600/min or 1000/h")
    return float(match["calls"]) / _SECONDS[match["per"]]


def rate_text(calls_per_s: float) -> str:
    """Format a rate as `per_second` parses it.

    >>> rate_text(50.0), rate_text(1.5), rate_text(2 / 60), rate_text(1000 / 3600)
    ('50/s', '90/min', '2/min', '1000/h')
    """
    for unit, seconds in _SECONDS.items():
        calls = round(calls_per_s * seconds, 6)
        if calls >= 1 and calls.is_integer():
            return f"{calls:.0f}/{unit}"
    return f"{calls_per_s:.4g}/s"


def _limits(limits: KeyLimits) -> str:
    parts = []
    if limits.rate is not None:
        burst = "" if limits.burst is None else f" (burst {limits.burst:,})"
        parts.append(f"{rate_text(limits.rate)}{burst}")
    if limits.concurrency is not None:
        parts.append(f"{limits.concurrency:,} in flight")
    if limits.queued is not None:
        parts.append(f"{limits.queued:,} queued")
    if limits.run_s is not None:
        parts.append(f"{limits.run_s:,g} run s/day")
    if limits.gpu_s is not None:
        parts.append(f"{limits.gpu_s:,g} GPU s/day")
    return ", ".join(parts) or "-"


@app.command("rm")
@_id_argument
@yes_option
@json_option
def remove(id: str, yes: bool, json: bool) -> None:  # noqa: A002
    """Delete a key. The gateway rejects it from then on."""
    confirm(f"Delete the API key {id}?", yes=yes)
    with connect() as client:
        client.delete_key(id)
    say_or_json(f"deleted key {id}", {"deleted": id}, json=json)


@app.command()
@yes_option
@json_option
def reset(yes: bool, json: bool) -> None:
    """Delete all keys, for example after losing them. The command needs no key: it uses NATS, not the gateway.

    Run it on the platform's machine: it reads GPUFN_HOME, or GPUFN_NATS_URL for an external NATS server. Afterwards a
    gateway on 127.0.0.1 serves this machine without a key. A gateway on another address rejects every request: make it
    listen on 127.0.0.1 to create the first key.
    """
    platform = import_module(_RESET_MODULE, "keys reset")
    confirm("Delete every API key?", yes=yes)
    deleted = platform.delete_all_keys()
    say_or_json(f"deleted {len(deleted)} key{'s' if len(deleted) != 1 else ''}", {"deleted": deleted}, json=json)


@app.command("webhook-secret")
@click.argument("id", cls=Argument, default="platform", help="Id of the key, or `platform`. Default: platform.")
@click.option("--change", is_flag=True, help="Create a new secret. The old one also signs until the next change.")
@json_option
def webhook_secret(id: str, change: bool, json: bool) -> None:  # noqa: A002
    """Show the secret that signs webhooks, for receivers that verify them.

    A webhook given with a call is signed with the secret of the key that submitted the call. The platform's secret
    signs the webhooks of functions, and of calls without a key.
    """
    with connect() as client:
        secret = client.webhook_secret(id, change=change)
    say_or_json(secret, {"key": id, "secret": secret}, json=json)
