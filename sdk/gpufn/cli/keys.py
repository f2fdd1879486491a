"""`gpufn keys create`, `ls`, `rm`, `webhook-secret`."""

from __future__ import annotations

from typing import Annotated

import typer

from gpufn.cli._render import Json, ago, print_json, print_table, say

app = typer.Typer(
    add_completion=False,
    rich_markup_mode=None,
    no_args_is_help=True,
    help="Make, list and delete API keys.",
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.command()
def create(
    label: Annotated[str, typer.Argument(help="What it is for, for those who list keys.")] = "",
    scope: Annotated[
        list[str] | None, typer.Option(help="invoke:FUNCTION, invoke:*, deploy, read or admin; may be given again.")
    ] = None,
    json: Json = False,
) -> None:
    """Make a key and show it, this once. Without --scope it may do everything.

    From the first key on, every request needs one: set GPUFN_API_KEY.
    """
    from gpufn._client import Client  # noqa: PLC0415

    with Client() as client:
        key = client.create_key(label, scope or ["admin"])
    if json:
        print_json(key)
    else:
        say(f"key {key.id} ({', '.join(key.scopes)}); keep it, it is not shown again:", err=True)
        say(key.key or "")


@app.command("ls")
def list_keys(json: Json = False) -> None:
    """List the keys, without their secrets."""
    from gpufn._client import Client  # noqa: PLC0415

    with Client() as client:
        keys = client.keys()
    if json:
        print_json(keys)
        return
    rows = [(key.id, key.label, ", ".join(key.scopes), ago(key.created_at)) for key in keys]
    print_table(("id", "label", "scopes", "created"), rows, empty="no keys: the gateway serves this machine only")


@app.command("rm")
def remove(id: Annotated[str, typer.Argument(help="The key's id.")], json: Json = False) -> None:  # noqa: A002
    """Delete a key; who uses it is refused from then on."""
    from gpufn._client import Client  # noqa: PLC0415

    with Client() as client:
        client.delete_key(id)
    if json:
        print_json({"deleted": id})
    else:
        say(f"deleted key {id}")


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
    from gpufn._client import Client  # noqa: PLC0415

    with Client() as client:
        secret = client.webhook_secret(id, change=change)
    if json:
        print_json({"key": id, "secret": secret})
    else:
        say(secret)
