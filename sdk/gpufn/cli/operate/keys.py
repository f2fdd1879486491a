"""`gpufn keys create`, `limit`, `ls`, `rm`, `reset`, `webhook-secret`."""

from __future__ import annotations

import importlib
import os
import re
from typing import Annotated

import typer

from gpufn.cli import new_app
from gpufn.cli.terminal.output import Json, ago, confirm, print_json, print_table, say
from gpufn_core.protocol.records import KeyLimits

_RATE = re.compile(r"(?P<calls>\d+(?:\.\d+)?)/(?P<per>s|min|h)")
_MIN_S, _MAX_S = 0.001, 1e9  # per day; excludes NaN and infinity, which JSON encodes as null (no limit)
_SECONDS = {"s": 1.0, "min": 60.0, "h": 3600.0}
_RESET_MODULE = "gpufn_local.key_reset"  # part of the platform, which may not be installed on a client

app = new_app(help="Create, limit, list and delete API keys.")

Id = Annotated[str, typer.Argument(help="Id of the key.")]
Rate = Annotated[str | None, typer.Option(help="Maximum rate of calls, such as 50/s, 600/min or 1000/h.")]
Burst = Annotated[
    int | None, typer.Option(help="Maximum number of calls at once. Default: the calls of one second.", min=1)
]
Concurrency = Annotated[int | None, typer.Option(help="Maximum number of synchronous calls in flight.", min=1)]
Queued = Annotated[int | None, typer.Option(help="Maximum number of submitted calls that have not ended.", min=1)]
RunSeconds = Annotated[
    float | None,
    typer.Option(help="Maximum run time of its calls in seconds per UTC day.", min=_MIN_S, max=_MAX_S),
]
GpuSeconds = Annotated[
    float | None, typer.Option(help="Maximum GPU seconds of its calls per UTC day.", min=_MIN_S, max=_MAX_S)
]


@app.callback(invoke_without_command=True)
def _list_by_default(context: typer.Context, json: Json = False) -> None:
    """Create, limit, list and delete API keys."""
    if context.invoked_subcommand is None:
        list_keys(json=json)


@app.command()
def create(  # noqa: PLR0917  Typer passes them by name
    label: Annotated[str, typer.Argument(help="Purpose of the key, shown in lists.")] = "",
    scope: Annotated[
        list[str] | None,
        typer.Option(
            help="Scope: invoke:FUNCTION, invoke:*, hi, pickle, deploy, read or admin. Repeatable. Default: admin."
        ),
    ] = None,
    rate: Rate = None,
    burst: Burst = None,
    concurrency: Concurrency = None,
    queued: Queued = None,
    run_seconds: RunSeconds = None,
    gpu_seconds: GpuSeconds = None,
    json: Json = False,
) -> None:
    """Create a key and print it once. Without --scope the key has every permission.

    While any key exists, every request needs one, from this machine too: set GPUFN_API_KEY. After the last key is
    deleted, requests need no key. If you lost all keys, `gpufn keys reset` deletes them.
    """
    from gpufn.client.client import Client  # noqa: PLC0415

    with Client() as client:
        key = client.create_key(
            label,
            scope or ["admin"],
            rate=per_second(rate),
            burst=burst,
            concurrency=concurrency,
            queued=queued,
            run_s=run_seconds,
            gpu_s=gpu_seconds,
        )
    if json:
        print_json(key)
    else:
        scopes = ", ".join(key.scopes) if scope else "admin: every permission"
        say(f"key {key.id} ({scopes}); store it, it is not shown again:", err=True)
        say(key.key or "")
    if not os.environ.get("GPUFN_API_KEY"):  # with other keys, the request would have needed one
        say("this is the first key: from now on every request needs a key, from this machine too", err=True)
        say("  to use it: export GPUFN_API_KEY=...", err=True)
        say(f"  to undo this, with the key set: gpufn keys rm {key.id}", err=True)


@app.command()
def limit(  # noqa: PLR0917  Typer passes them by name
    id: Id,  # noqa: A002
    rate: Rate = None,
    burst: Burst = None,
    concurrency: Concurrency = None,
    queued: Queued = None,
    run_seconds: RunSeconds = None,
    gpu_seconds: GpuSeconds = None,
    json: Json = False,
) -> None:
    """Replace all limits of a key. Without options, remove its limits."""
    from gpufn.client.client import Client  # noqa: PLC0415

    with Client() as client:
        key = client.limit_key(
            id,
            rate=per_second(rate),
            burst=burst,
            concurrency=concurrency,
            queued=queued,
            run_s=run_seconds,
            gpu_s=gpu_seconds,
        )
    if json:
        print_json(key)
    else:
        say(f"key {key.id}: {_limits(key.limits)}")


@app.command("ls")
def list_keys(json: Json = False) -> None:
    """List the keys, without their secrets."""
    from gpufn.client.client import Client  # noqa: PLC0415

    with Client() as client:
        keys = client.keys()
    if json:
        print_json(keys)
        return
    rows = [(key.id, key.label, ", ".join(key.scopes), _limits(key.limits), ago(key.created_at)) for key in keys]
    titles = ("id", "label", "scopes", "limits", "created")
    print_table(titles, rows, empty="no keys: the gateway serves this machine only")


def per_second(rate: str | None) -> float | None:
    """
    >>> per_second("50/s"), per_second("90/min"), per_second("1800/h")
    (50.0, 1.5, 0.5)
    """
    if rate is None:
        return None
    match = _RATE.fullmatch(rate.strip())
    if match is None or not float(match["calls"]):
        raise typer.BadParameter(f"{rate!r} is not a rate: write for example 50/s, 600/min or 1000/h")
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
def remove(id: Id, json: Json = False) -> None:  # noqa: A002
    """Delete a key. The gateway rejects it from then on."""
    from gpufn.client.client import Client  # noqa: PLC0415

    with Client() as client:
        client.delete_key(id)
    if json:
        print_json({"deleted": id})
    else:
        say(f"deleted key {id}")


@app.command()
def reset(
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Delete without asking.")] = False,
    json: Json = False,
) -> None:
    """Delete all keys, for example after losing them. The command needs no key: it uses NATS, not the gateway.

    Run it on the platform's machine: it reads GPUFN_HOME, or GPUFN_NATS_URL for an external NATS server. Afterwards a
    gateway on 127.0.0.1 serves this machine without a key. A gateway on another address rejects every request: make it
    listen on 127.0.0.1 to create the first key.
    """
    if not yes and not json:
        confirm("Delete every API key?")
    deleted = importlib.import_module(_RESET_MODULE).delete_all_keys()
    if json:
        print_json({"deleted": deleted})
    else:
        say(f"deleted {len(deleted)} key{'s' if len(deleted) != 1 else ''}")


@app.command("webhook-secret")
def webhook_secret(
    id: Annotated[str, typer.Argument(help="Id of the key, or `platform`.")] = "platform",  # noqa: A002
    change: Annotated[
        bool, typer.Option("--change", help="Create a new secret. The old one also signs until the next change.")
    ] = False,
    json: Json = False,
) -> None:
    """Show the secret that signs webhooks, for receivers that verify them.

    A webhook given with a call is signed with the secret of the key that submitted the call. The platform's secret
    signs the webhooks of functions, and of calls without a key.
    """
    from gpufn.client.client import Client  # noqa: PLC0415

    with Client() as client:
        secret = client.webhook_secret(id, change=change)
    if json:
        print_json({"key": id, "secret": secret})
    else:
        say(secret)
