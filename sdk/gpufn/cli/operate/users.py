"""`gpufn users ls` and `revoke`."""

from __future__ import annotations

import click

from gpufn.cli.terminal.command import Argument, Group, connect, json_option
from gpufn.cli.terminal.output import WrongUsage, ago, print_json, print_table, say_or_json

app = Group("users", help="List the users that have logged in, and end their tokens.")


@app.command("ls")
@json_option
def list_users(json: bool) -> None:
    """List the users and workloads that have logged in."""
    with connect() as client:
        users = client.users()
    if json:
        print_json(users)
        return
    rows = [(user.id, user.name, ", ".join(user.scopes), ago(user.seen_at), user.issuer) for user in users]
    print_table(("id", "name", "scopes", "last login", "issuer"), rows, empty="no user has logged in")


@app.command()
@click.argument("id", cls=Argument, required=False, help="Id of the user.")
@click.option("--all", "everyone", is_flag=True, help="End the tokens of all users and API keys.")
@json_option
def revoke(id: str | None, everyone: bool, json: bool) -> None:  # noqa: A002
    """End the tokens of a user.

    The user can log in again. To exclude somebody, change the groups at the identity provider first.
    """
    if (id is None) != everyone:
        raise WrongUsage("give the id of a user, or --all")
    with connect() as client:
        client.revoke_tokens(id)
    say_or_json(f"ended the tokens of {id or 'all users and API keys'}", {"revoked": id or "all"}, json=json)
