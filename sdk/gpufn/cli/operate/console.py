"""`gpufn console`."""

from __future__ import annotations

import webbrowser

import click

from gpufn.cli.terminal.command import Command, connect, json_option
from gpufn.cli.terminal.output import print_json, say


@click.command(cls=Command)
@click.option("--no-browser", is_flag=True, help="Only print the address. It signs in for 30 seconds.")
@json_option
def console(no_browser: bool, json: bool) -> None:
    """Open the web console, signed in with your API key or login.

    The address that the browser opens contains a ticket. It is valid for 30 seconds and becomes a session of at most
    12 hours.
    """
    with connect() as client:
        ticket = client.console_ticket()
        page = f"{client.url}/console"
        address = f"{page}#ticket={ticket}" if ticket else page
    if json:
        print_json({"url": address})
        return
    if no_browser or not webbrowser.open(address):
        say(address)
    else:
        say(f"the console is at {page}")
