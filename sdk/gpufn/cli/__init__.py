"""The `gpufn` command. One module per noun or verb, imported only when its command runs, so `--help` is fast.

Exit codes:
    0 success   1 failure   2 wrong usage   3 no gateway responds   4 not found   5 not allowed
    6 no capacity now, retry later   7 the function raised   8 no engine could be built   130 interrupted
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

# name → module and function, and the first line of its help (a test compares them)
COMMANDS: dict[str, tuple[str, str]] = {
    "up": ("gpufn_local.up:up", "Run the platform on this machine."),
    "down": ("gpufn_local.down:down", "Stop the platform on this machine."),
    "deploy": ("gpufn.cli.functions.deploy:deploy", "Deploy the functions of a file, or a model."),
    "build": ("gpufn.cli.models.build:build", "Build a model's engines without deploying it."),
    "invoke": ("gpufn.cli.calls.invoke:invoke", "Call a function and print its result."),
    "submit": (
        "gpufn.cli.calls.submit:submit",
        "Queue a call and print its id, for `gpufn result ID`.",
    ),
    "map": (
        "gpufn.cli.calls.map:map_",
        "Call a function for each line of a file, and print one result per line.",
    ),
    "status": (
        "gpufn.cli.calls.submit:status",
        "Show the status of a submitted call or a map.",
    ),
    "result": ("gpufn.cli.calls.submit:result", "Print the result of a submitted call, or its error."),
    "cancel": (
        "gpufn.cli.calls.submit:cancel",
        "Cancel a submitted call, or the remaining items of a map.",
    ),
    "ls": ("gpufn.cli.functions.manage:ls", "List the functions."),
    "describe": ("gpufn.cli.functions.manage:describe", "Show a function's revision, workers and options."),
    "logs": ("gpufn.cli.functions.logs:logs", "Show the logs of a function's workers."),
    "calls": ("gpufn.cli.calls.history:calls", "List submitted calls and maps, newest first."),
    "dlq": (
        "gpufn.cli.calls.dead_letters:app",
        "List, show, replay and drop dead letters (submitted calls that failed permanently).",
    ),
    "why": ("gpufn.cli.functions.why:why", "Explain a function's number of workers, and why its calls wait."),
    "scale": ("gpufn.cli.functions.manage:scale", "Set the minimum and maximum number of a function's workers."),
    "rollback": ("gpufn.cli.functions.manage:rollback", "Make an earlier revision active."),
    "rm": ("gpufn.cli.functions.manage:rm", "Delete a function. Queued calls are cancelled; running calls finish."),
    "schedules": (
        "gpufn.cli.functions.schedules:app",
        "List, add, pause and remove schedules.",
    ),
    "usage": (
        "gpufn.cli.functions.usage:usage",
        "Show the run time and the GPU seconds of calls.",
    ),
    "nodes": ("gpufn.cli.operate.nodes:nodes", "List the nodes and their devices."),
    "top": ("gpufn.cli.operate.top:top", "Watch devices and their workers live."),
    "builds": ("gpufn.cli.models.builds:app", "List and cancel model builds, and read their reports."),
    "engines": (
        "gpufn.cli.models.engines:app",
        "List built engines, and remove unused ones.",
    ),
    "models": ("gpufn.cli.models.list:app", "List and describe the models that serve."),
    "keys": ("gpufn.cli.operate.keys:app", "Create, limit, list and delete API keys."),
    "simulate": ("gpufn_local.simulate:simulate", "Compare orders of calls on a GPU that functions share by time."),
    "doctor": ("gpufn_local.doctor:doctor", "Check this machine, and say what to do about each finding."),
    "version": ("gpufn.cli.version:version", "Show the versions of gpufn, Python and the dependencies."),
    "completion": (
        "gpufn.cli.completion:completion",
        "Print a shell script that completes commands, options and functions.",
    ),
}
COMPLETE = "_GPUFN_COMPLETE"  # set by a shell that requests completions
_ARGV = "gpufn.argv"  # context key: the command and its arguments
_UsageError: Any = typer.BadParameter.__mro__[1]  # click's: from the installed click, or the copy in newer typers
_ESCAPE_ERRORS = "gpufn-escape"  # codec error handler for characters that cannot be encoded
_TYPE_NAMES: dict[Any, str] = {str: "str", int: "int", float: "float", Path: "path"}
_EXIT_CODES = (
    "2 wrong usage, 3 no gateway, 4 not found, 5 not allowed, 6 no capacity, 7 the function raised, 8 build failed, "
    "else 1"
)


class LazyGroup(TyperGroup):
    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in COMMANDS:
            return None
        module, _, attribute = COMMANDS[cmd_name][0].partition(":")
        target = getattr(importlib.import_module(module), attribute)
        if not isinstance(target, typer.Typer):
            function, target = target, new_app()
            target.command(cmd_name)(function)
        command = typer.main.get_command(target)
        command.name = cmd_name
        _set_metavars(command)
        return command

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and args[0] not in COMMANDS:
            from gpufn.cli.terminal.suggestions import similar_command  # noqa: PLC0415

            ctx.fail(f"there is no command {args[0]!r}{similar_command(args[0], COMMANDS)}")
        ctx.meta[_ARGV] = list(args)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the help of all commands without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])

    def make_context(self, *args: Any, **options: Any) -> Any:
        with _error_reports():  # --help writes output here
            return super().make_context(*args, **options)

    def invoke(self, ctx: Any) -> Any:
        with _error_reports(ctx):
            try:
                return super().invoke(ctx)
            except _UsageError as error:
                from gpufn.cli.terminal.suggestions import usage_hint  # noqa: PLC0415

                error.message += usage_hint(error.message, ctx.meta.get(_ARGV, []))
                if not _wants_json(ctx):
                    raise
                from gpufn.cli.terminal.output import WrongUsage  # noqa: PLC0415

                raise WrongUsage(error.format_message()) from error


def _set_metavars(command: Any) -> None:
    """Show the value of an option as `<int>` instead of Typer's `<int range>` or `<list[str]>`."""
    for subcommand in getattr(command, "commands", {}).values():
        _set_metavars(subcommand)
    hints = get_type_hints(command.callback) if command.callback is not None else {}
    for param in command.params:
        kinds = {hints.get(param.name), *get_args(hints.get(param.name))}
        kinds |= {item for kind in kinds for item in get_args(kind)}
        if param.param_type_name != "option":
            continue
        if names := [_TYPE_NAMES[kind] for kind in kinds if kind in _TYPE_NAMES]:
            param.metavar = f"<{names[0]}>"
        elif choices := [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Enum)]:
            param.metavar = f"<{'|'.join(str(each.value) for each in choices[0])}>"


def _wants_json(ctx: Any) -> bool:
    """Return whether the command line has --json, even if it could not be parsed."""
    argv: list[str] = ctx.meta.get(_ARGV, [])
    return "--json" in (argv[: argv.index("--")] if "--" in argv else argv)


@contextlib.contextmanager
def _error_reports(ctx: Any = None) -> Iterator[None]:
    """Turn an error into one line and an exit code. A closed pipe, as behind `| head`, ends the command with code 0."""
    try:
        yield
    except BrokenPipeError as error:
        _discard(sys.stdout)
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
        except OSError:  # standard error cannot be written
            _discard(sys.stderr)
        raise typer.Exit(code) from error


def _version(show: bool) -> None:
    if show:
        import gpufn  # noqa: PLC0415

        sys.stdout.write(f"gpufn {gpufn.__version__}\n")
        sys.stdout.flush()
        raise typer.Exit


def new_app(**options: Any) -> typer.Typer:
    """Return a Typer app with the settings that all commands share."""
    return typer.Typer(
        add_completion=False,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
        **options,
    )


app = new_app(cls=LazyGroup, no_args_is_help=True)


@app.callback(epilog=f"--debug, anywhere, shows the traceback of an error. Exit codes on failure: {_EXIT_CODES}.")
def _gpufn(
    url: Annotated[
        str | None, typer.Option(help="Address of the gateway. Default: GPUFN_URL, else the one on this machine.")
    ] = None,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version of gpufn.")
    ] = False,
) -> None:
    """Serverless GPU functions on your own machines."""
    if url:
        from gpufn.cli.terminal.output import as_usage_error  # noqa: PLC0415
        from gpufn_core.encoding.urls import gateway_address  # noqa: PLC0415

        with as_usage_error("--url"):
            gateway_address(url)
        os.environ["GPUFN_URL"] = url


def main() -> NoReturn:
    _open_streams()
    argv = sys.argv[1:]
    options = argv[: argv.index("--")] if "--" in argv else argv
    if "--debug" in options:
        argv.remove("--debug")
        os.environ["GPUFN_DEBUG"] = "1"
    if COMPLETE in os.environ:
        from typer.completion import completion_init  # type: ignore[attr-defined]  # noqa: PLC0415

        completion_init()
    try:
        typer.main.get_command(app).main(args=argv, prog_name="gpufn")
    except KeyboardInterrupt:
        sys.exit(130)
    except OSError:  # the usage error could not be written
        _discard(sys.stderr)
        sys.exit(1)
    sys.exit(0)


def _open_streams() -> None:
    """Replace missing standard streams, and escape characters that the locale cannot encode on standard output.

    Missing streams become /dev/null, so that no file we open later gets their file descriptors.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115
    codecs.register_error(_ESCAPE_ERRORS, _escape)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors=_ESCAPE_ERRORS)


def _escape(error: UnicodeError) -> tuple[str, int]:
    r"""Escape as JSON does: \uXXXX, with surrogate pairs above 16 bits."""
    assert isinstance(error, UnicodeEncodeError)
    units = error.object[error.start : error.end].encode("utf-16-be", "surrogatepass")
    pairs = zip(units[::2], units[1::2], strict=True)
    return "".join(f"\\u{high:02x}{low:02x}" for high, low in pairs), error.end


def _discard(stream: TextIO) -> None:
    """Redirect a stream to /dev/null, so that the flush at exit does not fail again."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
