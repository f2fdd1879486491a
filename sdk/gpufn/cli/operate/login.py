"""`gpufn login`, `logout`, `whoami` and `token`."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import click

from gpufn.cli.operate.keys import seconds_of
from gpufn.cli.terminal.command import Command, connect, json_option
from gpufn.cli.terminal.output import duration, print_fields, print_json, say, say_or_json

if TYPE_CHECKING:
    from gpufn.client.login.device_flow import DeviceCode


@click.command(cls=Command)
@json_option
def login(json: bool) -> None:
    """Log in at the gateway through its identity provider.

    Open the address that is printed, in a browser on any machine, and approve the login. The token is stored in
    GPUFN_HOME and renewed while the provider allows it. It is used if GPUFN_API_KEY is not set.
    """
    from gpufn.client.login.log_in import log_in  # noqa: PLC0415

    with connect() as client:
        issued = log_in(client, _show)
    as_json = {"id": issued.id, "name": issued.name, "scopes": issued.scopes, "expires_at": issued.expires_at}
    say_or_json(f"logged in as {issued.name} ({', '.join(issued.scopes)})", as_json, json=json)


def _show(code: DeviceCode) -> None:
    say(f"open {code.verification_uri_complete or code.verification_uri}", err=True)
    say(f"and approve the code {code.user_code}; it is valid for {duration(code.expires_in)}", err=True)


@click.command(cls=Command)
@json_option
def logout(json: bool) -> None:
    """Forget the login at the gateway.

    The token stays valid until it expires; `gpufn users revoke` ends the tokens of a user.
    """
    from gpufn.client.login.stored_logins import Logins  # noqa: PLC0415

    with connect() as client:
        removed = Logins().remove(client.url)
    text = "there is no login at this gateway" if removed is None else f"logged out {removed.name}"
    say_or_json(text, {"logged_out": removed is not None}, json=json)


@click.command(cls=Command)
@json_option
def whoami(json: bool) -> None:
    """Show who you are at the gateway: your id, your scopes, and when your key or token expires."""
    with connect() as client:
        principal = client.whoami()
    if json:
        print_json(principal)
        return
    expires = "never" if principal.expires_at is None else f"in {duration(principal.expires_at - time.time())}"
    print_fields(
        [
            ("id", principal.id or "none: this gateway has no API keys, and serves this machine only"),
            ("name", principal.name or "-"),
            ("scopes", ", ".join(principal.scopes)),
            ("expires", expires),
        ]
    )


@click.command(cls=Command)
@click.option("--scope", multiple=True, help="Scope that you have. Repeatable. Default: all of them.")
@click.option("--expires", help="Time until the token expires, such as 15min. Default and maximum: set by the gateway.")
@json_option
def token(*, scope: tuple[str, ...], expires: str | None, json: bool) -> None:
    """Print a short-lived token, for your API key or your login.

    Programs send it like an API key, as GPUFN_API_KEY. It has at most your scopes, and ends with your key or login.
    """
    with connect() as client:
        issued = client.token(list(scope) or None, expires_in_s=seconds_of(expires))
    say_or_json(issued.token, issued, json=json)
