"""`gpufn keys create`, `limit`, `ls`, `rm`, `reset`, `webhook-secret`."""

from __future__ import annotations

import importlib
import os
import re
from typing import Annotated

import typer

from gpufn.cli import new_app
from gpufn.cli.terminal.output import Json, ago, ask, print_json, print_table, say
from gpufn_core.protocol.records import KeyLimits

_RATE = re.compile(r"(?P<calls>\d+(?:\.\d+)?)/(?P<per>s|min|h)")
_LEAST_S, _MOST_S = 0.001, 1e9  # per day; JSON has no word for NaN, and without one there would be no limit
_SECONDS = {"s": 1.0, "min": 60.0, "h": 3600.0}
_RESET_MODULE = "gpufn_local.key_reset"  # of the platform, which a laptop may not have

app = new_app(help="Make, limit, list and delete API keys.")

Id = Annotated[str, typer.Argument(help="The key's id.")]
Rate = Annotated[str | None, typer.Option(help="So many calls, such as 50/s, 600/min or 1000/h.")]
Burst = Annotated[
    int | None, typer.Option(help="So many of the rate's calls at once; else as many as in a second.", min=1)
]
Concurrency = Annotated[int | None, typer.Option(help="So many calls that are waited for, at a time.", min=1)]
Queued = Annotated[int | None, typer.Option(help="So many submitted calls that have not ended.", min=1)]
RunSeconds = Annotated[
    float | None,
    typer.Option(help="So many seconds that its calls run, per day (UTC).", min=_LEAST_S, max=_MOST_S),
]
GpuSeconds = Annotated[float | None, typer.Option(help="So many GPU seconds per day (UTC).", min=_LEAST_S, max=_MOST_S)]


@app.callback(invoke_without_command=True)
def _alone(context: typer.Context, json: Json = False) -> None:
    """Make, limit, list and delete API keys."""
    if context.invoked_subcommand is None:
        list_keys(json=json)


@app.command()
def create(  # noqa: PLR0917  Typer passes them by name
    label: Annotated[str, typer.Argument(help="What it is for, for those who list keys.")] = "",
    scope: Annotated[
        list[str] | None,
        typer.Option(help="invoke:FUNCTION, invoke:*, hi, pickle, deploy, read or admin; may be given again."),
    ] = None,
    rate: Rate = None,
    burst: Burst = None,
    concurrency: Concurrency = None,
    queued: Queued = None,
    run_seconds: RunSeconds = None,
    gpu_seconds: GpuSeconds = None,
    json: Json = False,
) -> None:
    """Make a key and show it, this once. Without --scope it may do everything.

    From the first key on, every request needs one, from this machine too: set GPUFN_API_KEY. When the last is deleted,
    none is needed any more. `gpufn keys reset` deletes those that are lost.
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
        may = ", ".join(key.scopes) if scope else "admin: it may do everything"
        say(f"key {key.id} ({may}); keep it, it is not shown again:", err=True)
        say(key.key or "")
    if not os.environ.get("GPUFN_API_KEY"):  # or it could not have been made
        say("it is the first: from now on every request needs a key, from this machine too", err=True)
        say("  to go on: export GPUFN_API_KEY=...", err=True)
        say(f"  to go back to none, with it: gpufn keys rm {key.id}", err=True)


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
    """Give a key these limits in place of those that it has; without any, it has none."""
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
    """As it is typed.

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
        parts.append(f"{limits.concurrency:,} at a time")
    if limits.queued is not None:
        parts.append(f"{limits.queued:,} queued")
    if limits.run_s is not None:
        parts.append(f"{limits.run_s:,g} run s/day")
    if limits.gpu_s is not None:
        parts.append(f"{limits.gpu_s:,g} GPU s/day")
    return ", ".join(parts) or "-"


@app.command("rm")
def remove(id: Id, json: Json = False) -> None:  # noqa: A002
    """Delete a key; who uses it is refused from then on."""
    from gpufn.client.client import Client  # noqa: PLC0415

    with Client() as client:
        client.delete_key(id)
    if json:
        print_json({"deleted": id})
    else:
        say(f"deleted key {id}")


@app.command()
def reset(
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    json: Json = False,
) -> None:
    """Delete every key, for who has lost theirs. It needs none: it asks the bus, not the gateway.

    It is for who runs the platform: it reads GPUFN_HOME, or GPUFN_NATS_URL for a NATS server of your own. A gateway
    on 127.0.0.1 then serves this machine again, without a key; one on another address serves nobody: have it listen on
    127.0.0.1 to make the first.
    """
    if not yes and not json:
        ask("Delete every API key?")
    deleted = importlib.import_module(_RESET_MODULE).delete_all_keys()
    if json:
        print_json({"deleted": deleted})
    else:
        say(f"deleted {len(deleted)} key{'s' if len(deleted) != 1 else ''}")


@app.command("webhook-secret")
def webhook_secret(
    id: Annotated[str, typer.Argument(help="The key's id; else the platform's own.")] = "platform",  # noqa: A002
    change: Annotated[
        bool, typer.Option("--change", help="Make a new one; the old one signs as well until the next.")
    ] = False,
    json: Json = False,
) -> None:
    """Show what webhooks are signed with: for a receiver, to check that they come from here.

    A call's own webhook is signed with the secret of the key that submitted it. The platform's signs those of
    functions, and of calls without a key.
    """
    from gpufn.client.client import Client  # noqa: PLC0415

    with Client() as client:
        secret = client.webhook_secret(id, change=change)
    if json:
        print_json({"key": id, "secret": secret})
    else:
        say(secret)
