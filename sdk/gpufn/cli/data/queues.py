"""`gpufn queue ls`, `rm`, and `gpufn dict ls`, `rm`."""

from __future__ import annotations

import click

from gpufn.cli.data.short_names import full_name
from gpufn.cli.terminal.command import Argument, Group, connect, json_option, yes_option
from gpufn.cli.terminal.output import confirm, print_json, print_table, say_or_json

queue = Group("queue", help="List and delete the queues of gpufn.Queue.")
dict_ = Group("dict", help="List and delete the dicts of gpufn.Dict.")

_name_argument = click.argument("name", cls=Argument, help="Name, such as prod/search/jobs or jobs.")


@queue.command("ls")
@json_option
def list_queues(json: bool) -> None:
    """List the queues that have items. The items of NAME-dead were delivered too often."""
    with connect() as client:
        queues = client.queues()
    if json:
        print_json(queues)
        return
    print_table(("name", "items"), [(each.name, str(each.items)) for each in queues], empty="no queue has items")


@queue.command("rm")
@_name_argument
@yes_option
@json_option
def remove_queue(name: str, yes: bool, json: bool) -> None:
    """Delete a queue with its items, also with those that are leased."""
    with connect() as client:
        name = full_name(client, name, client.queues)
        confirm(f"Delete the queue {name} with all of its items?", yes=yes)
        client.delete_queue(name)
    say_or_json(f"deleted the queue {name}", {"deleted": name}, json=json)


@dict_.command("ls")
@json_option
def list_dicts(json: bool) -> None:
    """List the dicts that have entries."""
    with connect() as client:
        dicts = client.dicts()
    if json:
        print_json(dicts)
        return
    print_table(("name", "entries"), [(each.name, str(each.entries)) for each in dicts], empty="no dict has entries")


@dict_.command("rm")
@_name_argument
@yes_option
@json_option
def remove_dict(name: str, yes: bool, json: bool) -> None:
    """Delete a dict with all of its entries."""
    with connect() as client:
        name = full_name(client, name, client.dicts)
        confirm(f"Delete the dict {name} with all of its entries?", yes=yes)
        client.delete_dict(name)
    say_or_json(f"deleted the dict {name}", {"deleted": name}, json=json)
