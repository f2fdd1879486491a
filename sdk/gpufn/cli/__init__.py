"""The command `gpufn`. One module per noun or verb; each is imported when its command runs, so `--help` is quick.

Exit codes:
    0 done   1 failed   2 wrong usage   3 no gateway answers   4 not found   5 not allowed   6 no room now, try again
    7 the function itself raised   8 no engine could be built   130 interrupted
"""

from __future__ import annotations

import codecs
import contextlib
import importlib
import io
import os
import sys
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, NoReturn, TextIO, get_args, get_type_hints

import typer
from typer.core import TyperGroup

# name → where it is, and its help (the first line of its docstring; a test compares them)
COMMANDS: dict[str, tuple[str, str]] = {
    "up": ("gpufn_local.up:up", "Run the platform on this machine."),
    "down": ("gpufn_local.down:down", "Stop the platform on this machine."),
    "deploy": ("gpufn.cli.functions.deploy:deploy", "Deploy the functions of a file, or a model."),
    "build": ("gpufn.cli.models.build:build", "Build a model's engines without deploying it."),
    "invoke": ("gpufn.cli.calls.invoke:invoke", "Call a function and print its result."),
    "submit": (
        "gpufn.cli.calls.submit:submit",
        "Queue a call and print its id; `gpufn result ID` has its result later.",
    ),
    "map": (
        "gpufn.cli.calls.map:map_",
        "Call a function for each line of a file, and print the results, one per line.",
    ),
    "status": (
        "gpufn.cli.calls.submit:status",
        "Say how a submitted call stands: why it waits, where it runs, how its attempts ended.",
    ),
    "result": ("gpufn.cli.calls.submit:result", "Print the result of a submitted call, or how it failed."),
    "cancel": (
        "gpufn.cli.calls.submit:cancel",
        "Cancel a submitted call, queued or running, or what is left of a map.",
    ),
    "ls": ("gpufn.cli.functions.manage:ls", "List the functions."),
    "describe": ("gpufn.cli.functions.manage:describe", "Show one function: its revision, workers and options."),
    "logs": ("gpufn.cli.functions.logs:logs", "Show what a function's workers wrote."),
    "calls": ("gpufn.cli.calls.history:calls", "List submitted calls and maps, the newest first."),
    "dlq": (
        "gpufn.cli.calls.dead_letters:app",
        "List the submitted calls that failed for good; show, replay or drop them.",
    ),
    "why": ("gpufn.cli.functions.why:why", "Say why a function has the workers it has, and why its calls wait."),
    "scale": ("gpufn.cli.functions.manage:scale", "Set how many workers a function has at least and at most."),
    "rollback": ("gpufn.cli.functions.manage:rollback", "Make an earlier revision the active one."),
    "rm": ("gpufn.cli.functions.manage:rm", "Delete a function; queued calls are cancelled, running ones finish."),
    "schedules": (
        "gpufn.cli.functions.schedules:app",
        "List, add and pause what functions are called by themselves for.",
    ),
    "usage": (
        "gpufn.cli.functions.usage:usage",
        "Show what calls took: how long they ran, and the GPU seconds that they are charged.",
    ),
    "nodes": ("gpufn.cli.operate.nodes:nodes", "List the nodes and their devices."),
    "top": ("gpufn.cli.operate.top:top", "Watch the devices and the workers on them, live."),
    "builds": ("gpufn.cli.models.builds:app", "List the builds of models, cancel one, or read its report."),
    "engines": (
        "gpufn.cli.models.engines:app",
        "List the engines that were built, and remove those that nothing uses.",
    ),
    "models": ("gpufn.cli.models.list:app", "List the models that are served, and show one."),
    "keys": ("gpufn.cli.operate.keys:app", "Make, limit, list and delete API keys."),
    "simulate": ("gpufn_local.simulate:simulate", "Compare orders of calls on a GPU that functions share by time."),
    "doctor": ("gpufn_local.doctor:doctor", "Check this machine, and say what to do about each finding."),
    "version": ("gpufn.cli.version:version", "Show the versions of gpufn and of what it runs on."),
    "completion": (
        "gpufn.cli.completion:completion",
        "Print what makes a shell complete commands, options and functions.",
    ),
}
COMPLETE = "_GPUFN_COMPLETE"  # set by a shell that asks what may come next
_TYPED = "gpufn.typed"  # in a context: the command and what follows it
_UsageError: Any = typer.BadParameter.__mro__[1]  # click's: of the one that is installed, or that newer typers bring
_ESCAPED = "gpufn-escaped"  # what is done with letters that cannot be encoded
_VALUES: dict[Any, str] = {str: "str", int: "int", float: "float", Path: "path"}
_EXIT_CODES = (
    "2 wrong usage, 3 no gateway, 4 not found, 5 not allowed, 6 no room now, 7 the function raised, 8 no engine, else 1"
)


class LazyGroup(TyperGroup):
    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in COMMANDS:
            return None
        module, _, attribute = COMMANDS[cmd_name][0].partition(":")
        found = getattr(importlib.import_module(module), attribute)
        if not isinstance(found, typer.Typer):
            command, found = found, new_app()
            found.command(cmd_name)(command)
        built = typer.main.get_command(found)
        built.name = cmd_name
        _name_values(built)
        return built

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and args[0] not in COMMANDS:
            from gpufn.cli.terminal.suggestions import command_near  # noqa: PLC0415

            ctx.fail(f"there is no command {args[0]!r}{command_near(args[0], COMMANDS)}")
        ctx.meta[_TYPED] = list(args)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])

    def make_context(self, *args: Any, **options: Any) -> Any:
        with _reported():  # --help writes as well
            return super().make_context(*args, **options)

    def invoke(self, ctx: Any) -> Any:
        with _reported(ctx):
            try:
                return super().invoke(ctx)
            except _UsageError as error:
                from gpufn.cli.terminal.suggestions import meant  # noqa: PLC0415

                error.message += meant(error.message, ctx.meta.get(_TYPED, []))
                if not _wants_json(ctx):
                    raise
                from gpufn.cli.terminal.output import WrongUsage  # noqa: PLC0415

                raise WrongUsage(error.format_message()) from error


def _name_values(command: Any) -> None:
    """Show the value of an option as `<int>`, where Typer has `<int range>` or `<list[str]>`."""
    for each in getattr(command, "commands", {}).values():
        _name_values(each)
    hints = get_type_hints(command.callback) if command.callback is not None else {}
    for param in command.params:
        kinds = {hints.get(param.name), *get_args(hints.get(param.name))}
        kinds |= {item for kind in kinds for item in get_args(kind)}
        if param.param_type_name != "option":
            continue
        if words := [_VALUES[kind] for kind in kinds if kind in _VALUES]:
            param.metavar = f"<{words[0]}>"
        elif choices := [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Enum)]:
            param.metavar = f"<{'|'.join(str(each.value) for each in choices[0])}>"


def _wants_json(ctx: Any) -> bool:
    """Also of a command that could not be parsed."""
    typed: list[str] = ctx.meta.get(_TYPED, [])
    return "--json" in (typed[: typed.index("--")] if "--" in typed else typed)


@contextlib.contextmanager
def _reported(ctx: Any = None) -> Iterator[None]:
    """What fails is one line and an exit code; that nobody reads on, as `head` does not, is the end and no failure."""
    try:
        yield
    except BrokenPipeError as error:
        _give_up(sys.stdout)
        raise typer.Exit(0) from error
    except typer.Exit:
        raise
    except Exception as error:
        if os.environ.get("GPUFN_DEBUG"):
            raise
        from gpufn.cli.terminal.output import exit_code, report  # noqa: PLC0415

        if (code := exit_code(error)) is None:
            raise
        try:
            report(error, json=ctx is not None and _wants_json(ctx))
        except OSError:  # there is no room where it would be said
            _give_up(sys.stderr)
        raise typer.Exit(code) from error


def _version(wanted: bool) -> None:
    if wanted:
        import gpufn  # noqa: PLC0415

        sys.stdout.write(f"gpufn {gpufn.__version__}\n")
        sys.stdout.flush()
        raise typer.Exit


def new_app(**options: Any) -> typer.Typer:
    """A group of commands that behaves as the others do."""
    return typer.Typer(
        add_completion=False,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
        **options,
    )


app = new_app(cls=LazyGroup, no_args_is_help=True)


@app.callback(epilog=f"With --debug, anywhere, an error shows its traceback. Exit codes on failure: {_EXIT_CODES}.")
def _gpufn(
    url: Annotated[str | None, typer.Option(help="The gateway; else GPUFN_URL, else the one on this machine.")] = None,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version of gpufn.")
    ] = False,
) -> None:
    """Serverless GPU functions on your own machines."""
    if url:
        from gpufn.cli.terminal.output import as_typed  # noqa: PLC0415
        from gpufn_core.encoding.urls import gateway_address  # noqa: PLC0415

        with as_typed("--url"):
            gateway_address(url)
        os.environ["GPUFN_URL"] = url


def main() -> NoReturn:
    _open_streams()
    argv = sys.argv[1:]
    own = argv[: argv.index("--")] if "--" in argv else argv
    if "--debug" in own:
        argv.remove("--debug")
        os.environ["GPUFN_DEBUG"] = "1"
    if COMPLETE in os.environ:
        from typer.completion import completion_init  # type: ignore[attr-defined]  # noqa: PLC0415

        completion_init()
    try:
        typer.main.get_command(app).main(args=argv, prog_name="gpufn")
    except KeyboardInterrupt:
        sys.exit(130)
    except OSError:  # what is wrong with the usage could not be said
        _give_up(sys.stderr)
        sys.exit(1)
    sys.exit(0)


def _open_streams() -> None:
    """Those that we were started without are empty ones: nothing that we open may get their numbers. Letters that the
    locale does not have are escaped."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115
    codecs.register_error(_ESCAPED, _escaped)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors=_ESCAPED)


def _escaped(error: UnicodeError) -> tuple[str, int]:
    """As JSON writes it, and Python too but for what is beyond 16 bits."""
    assert isinstance(error, UnicodeEncodeError)
    units = error.object[error.start : error.end].encode("utf-16-be", "surrogatepass")
    pairs = zip(units[::2], units[1::2], strict=True)
    return "".join(f"\\u{high:02x}{low:02x}" for high, low in pairs), error.end


def _give_up(stream: TextIO) -> None:
    """What it still holds is not tried again at our end."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
