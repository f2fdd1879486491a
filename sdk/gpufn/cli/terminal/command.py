"""Command and group classes, parameter types and options shared by all commands."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from gpufn.client.client import Client

_VALUE_NAMES = {"text": "str", "integer": "int"}
_LONGEST_HELP = 1000  # characters of a first sentence

Decorator = Callable[[Callable[..., None]], Callable[..., None]]

PATH = click.Path(path_type=Path)


class IntRange(click.IntRange):
    """Range of integers, which errors call an integer instead of an "integer range"."""

    name = "integer"


class FloatRange(click.FloatRange):
    """Range of floats without NaN, which click accepts in every range."""

    name = "float"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number = float(super().convert(value, param, ctx))
        if math.isnan(number):
            self.fail(f"{value!r} is not a number.", param, ctx)
        return number


class Argument(click.Argument):
    """Argument with a help text, which click before 8.5 does not support."""

    def __init__(self, param_decls: Sequence[str], help: str, **attrs: Any) -> None:  # noqa: A002
        super().__init__(param_decls, **attrs)
        self.help = help


class Command(click.Command):
    """Command that shows the value of an option as `<int>` in its help, and the help of its arguments."""

    def __init__(self, *args: Any, **attrs: Any) -> None:
        super().__init__(*args, **attrs)
        for param in self.params:
            if isinstance(param, click.Option) and not param.is_flag:
                param.metavar = f"<{_value_name(param.type)}>"

    def format_help(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        self.format_usage(ctx, formatter)
        self.format_help_text(ctx, formatter)
        self.format_arguments(ctx, formatter)
        self.format_options(ctx, formatter)
        self.format_epilog(ctx, formatter)

    def format_arguments(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        rows = [(param.human_readable_name, param.help or "") for param in self.params if isinstance(param, Argument)]
        if rows:
            with formatter.section("Arguments"):
                formatter.write_dl(rows)


class Group(Command, click.Group):
    """Commands about one kind of object, in the order of their definition. `gpufn GROUP` runs `gpufn GROUP ls`."""

    command_class = Command

    def __init__(self, name: str, help: str) -> None:  # noqa: A002
        option = click.Option(["--json"], is_flag=True, help=_JSON_HELP)
        super().__init__(name, help=help, callback=_list, params=[option], invoke_without_command=True)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if not ctx.resilient_parsing:
            check_command(ctx, args[0], self.commands)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the help of all commands; click would cut it."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, each.get_short_help_str(_LONGEST_HELP)) for name, each in self.commands.items()])


def check_command(ctx: click.Context, name: str, commands: Collection[str]) -> None:
    """Fail with a similar command if there is none of this name."""
    if name not in commands:
        from gpufn.cli.terminal.suggestions import similar_command  # noqa: PLC0415

        ctx.fail(f"there is no command {name!r}{similar_command(name, commands)}")


@click.pass_context
def _list(context: click.Context, json: bool) -> None:
    group = context.command
    if context.invoked_subcommand is None and isinstance(group, Group):
        context.invoke(group.commands["ls"], json=json)


def connect() -> Client:
    """Create the Client of a command. Its import takes 70 ms, which the help and completions need not wait for."""
    from gpufn.client.client import Client  # noqa: PLC0415

    return Client()


def options_together(*options: Decorator) -> Decorator:
    """Combine the decorators of options into one, which adds the options in this order."""

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


def _value_name(kind: click.ParamType[Any]) -> str:
    if isinstance(kind, click.Choice):
        return "|".join(kind.choices)
    return _VALUE_NAMES.get(kind.name, kind.name)


_JSON_HELP = "Print JSON. Errors are JSON too, on standard error."

json_option = click.option("--json", is_flag=True, help=_JSON_HELP)
limit_option = click.option("--limit", "-n", type=IntRange(1, 1000), default=20, help="Maximum number of rows.")
yes_option = click.option("--yes", "-y", is_flag=True, help="Do not ask first.")
