"""The `gpufn` command. One module per noun or verb, imported only when its command runs, so `--help` is fast.

Exit codes:
    0 success   1 failure   2 wrong usage   3 no gateway responds   4 not found   5 not allowed
    6 no capacity now, retry later   7 the function raised   8 no engine could be built   130 interrupted
"""

from __future__ import annotations

import codecs
import contextlib
import importlib.util
import io
import os
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import TYPE_CHECKING, Any, NoReturn, TextIO

import click

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

# heading → name → module and function, and the first line of its help (a test compares them)
SECTIONS: dict[str, dict[str, tuple[str, str]]] = {
    "Develop": {
        "init": ("gpufn.cli.develop.init:init", "Make a project folder."),
        "deploy": ("gpufn.cli.functions.deploy:deploy", "Deploy the functions of a file, or a model."),
        "run": ("gpufn.cli.develop.run:run", "Call a function of a file without deploying it for good."),
        "serve": ("gpufn.cli.develop.serve:serve", "Serve the functions of a file while you edit it, until Ctrl-C."),
        "diff": ("gpufn.cli.develop.diff:diff", "Show what a deploy of a file would change."),
        "build": ("gpufn.cli.models.build:build", "Build a model's engines without deploying it."),
        "exec": ("gpufn.cli.develop.exec:exec_", "Run a command in a worker of its own, where a function runs."),
        "shell": ("gpufn.cli.develop.exec:shell", "Open a shell in a worker of its own, where a function runs."),
        "profile": ("gpufn.cli.develop.profile:profile", "Show where a worker spends its time or memory."),
    },
    "Call": {
        "invoke": ("gpufn.cli.calls.invoke:invoke", "Call a function and print its result."),
        "submit": ("gpufn.cli.calls.submit:submit", "Queue a call and print its id, for `gpufn result ID`."),
        "map": ("gpufn.cli.calls.map:map_", "Call a function for each line of a file, and print one result per line."),
        "status": ("gpufn.cli.calls.submit:status", "Show the status of a submitted call or a map."),
        "result": ("gpufn.cli.calls.submit:result", "Print the result of a submitted call, or its error."),
        "cancel": ("gpufn.cli.calls.submit:cancel", "Cancel a submitted call, or the remaining items of a map."),
        "calls": ("gpufn.cli.calls.history:calls", "List submitted calls and maps, newest first."),
        "dlq": (
            "gpufn.cli.calls.dead_letters:app",
            "List, show, replay and drop dead letters (submitted calls that failed permanently).",
        ),
        "traces": ("gpufn.cli.calls.trace:traces", "List the traces that the gateway keeps, newest first."),
        "trace": (
            "gpufn.cli.calls.trace:trace",
            "Show how the time of a traced call was spent, with its attempts and nested calls.",
        ),
    },
    "Functions": {
        "ls": ("gpufn.cli.functions.manage:ls", "List the functions."),
        "describe": ("gpufn.cli.functions.manage:describe", "Show a function's revision, workers and options."),
        "logs": ("gpufn.cli.functions.logs:logs", "Show the logs of a function's workers."),
        "why": ("gpufn.cli.functions.why:why", "Explain a function's number of workers, and why its calls wait."),
        "scale": ("gpufn.cli.functions.manage:scale", "Set the minimum and maximum number of a function's workers."),
        "traffic": (
            "gpufn.cli.functions.traffic:traffic",
            "Show or set how calls are divided between a function's revisions.",
        ),
        "apps": ("gpufn.cli.functions.apps:app", "List the apps, and roll one back."),
        "rollback": ("gpufn.cli.functions.manage:rollback", "Make an earlier revision active."),
        "rm": ("gpufn.cli.functions.manage:rm", "Delete a function. Queued calls are cancelled; running calls finish."),
        "schedules": ("gpufn.cli.functions.schedules:app", "List, add, pause and remove schedules."),
        "advise": (
            "gpufn.cli.functions.advise:advise",
            "Compare what a function asks for with what it used, and replay its calls with other idle timeouts.",
        ),
        "history": ("gpufn.cli.functions.history:history", "Show calls, errors, latency and workers over time."),
    },
    "Models": {
        "models": ("gpufn.cli.models.list:app", "List and describe the models that serve."),
        "builds": ("gpufn.cli.models.builds:app", "List and cancel model builds, and read their reports."),
        "engines": ("gpufn.cli.models.engines:app", "List built engines, and remove unused ones."),
    },
    "Data": {
        "volume": ("gpufn.cli.data.volumes:app", "Copy files to and from volumes, and list and delete them."),
        "queue": ("gpufn.cli.data.queues:queue", "List and delete the queues of gpufn.Queue."),
        "dict": ("gpufn.cli.data.queues:dict_", "List and delete the dicts of gpufn.Dict."),
    },
    "Operate": {
        "up": ("gpufn_local.up:up", "Run the platform on this machine."),
        "down": ("gpufn_local.down:down", "Stop the platform on this machine."),
        "doctor": ("gpufn_local.doctor:doctor", "Check this machine, and say what to do about each finding."),
        "console": ("gpufn.cli.operate.console:console", "Open the web console, signed in with your API key or login."),
        "nodes": ("gpufn.cli.operate.nodes:app", "List the nodes and their devices, and drain them."),
        "top": ("gpufn.cli.operate.top:top", "Watch devices and their workers live."),
        "events": ("gpufn.cli.operate.events:events", "List deploys, scale decisions, faults and other events."),
        "usage": ("gpufn.cli.functions.usage:usage", "Show the run time, the GPU seconds and the energy of calls."),
        "cost": (
            "gpufn.cli.functions.cost:cost",
            "Show what functions cost: used, idle, CPU and unused time, at the prices of GPUFN_PRICES.",
        ),
        "simulate": ("gpufn_local.simulate:simulate", "Compare orders of calls on a GPU that functions share by time."),
    },
    "Access": {
        "login": ("gpufn.cli.operate.login:login", "Log in at the gateway through its identity provider."),
        "logout": ("gpufn.cli.operate.login:logout", "Forget the login at the gateway."),
        "whoami": (
            "gpufn.cli.operate.login:whoami",
            "Show who you are at the gateway: your id, your scopes, and when your key or token expires.",
        ),
        "token": ("gpufn.cli.operate.login:token", "Print a short-lived token, for your API key or your login."),
        "keys": ("gpufn.cli.operate.keys:app", "Create, rotate, limit, list and delete API keys."),
        "users": ("gpufn.cli.operate.users:app", "List the users that have logged in, and end their tokens."),
        "teams": ("gpufn.cli.operate.teams:app", "List, set and remove teams: who owns which functions."),
        "secrets": ("gpufn.cli.operate.secrets:app", "Set, list and delete secrets, and rotate their master key."),
        "signing": (
            "gpufn.cli.operate.signing:app",
            "Make signing keys, trust and list them, and require signatures of deploys.",
        ),
        "audit": ("gpufn.cli.operate.audit:app", "Show, export and verify the audit log."),
    },
    "This command": {
        "version": ("gpufn.cli.version:version", "Show the versions of gpufn, Python and the dependencies."),
        "completion": (
            "gpufn.cli.completion:completion",
            "Print a shell script that completes commands, options and functions.",
        ),
    },
}
COMMANDS = {name: command for section in SECTIONS.values() for name, command in section.items()}
_NAME_WIDTH = max(map(len, COMMANDS))
COMPLETE = "_GPUFN_COMPLETE"  # set by a shell that requests completions
_ARGV = "gpufn.argv"  # context key: the command and its arguments
_ESCAPE_ERRORS = "gpufn-escape"  # codec error handler for characters that cannot be encoded
_PLATFORM = ("gpufn_local", "gpufn_platform")
_EXIT_CODES = (
    "2 wrong usage, 3 no gateway, 4 not found, 5 not allowed, 6 no capacity, 7 the function raised, 8 build failed, "
    "else 1"
)


class LazyGroup(click.Group):
    """Group that imports the module of a command only when the command runs."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, _, attribute = COMMANDS[cmd_name][0].partition(":")
        if ctx.resilient_parsing and importlib.util.find_spec(module.partition(".")[0]) is None:
            return None  # a shell completes a command of the platform, which is not installed here
        command: click.Command = getattr(import_module(module, cmd_name), attribute)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if not ctx.resilient_parsing:
            from gpufn.cli.terminal.command import check_command  # noqa: PLC0415

            check_command(ctx, args[0], COMMANDS)
        ctx.meta[_ARGV] = list(args)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the help of all commands, below their headings, without importing them."""
        for heading, commands in SECTIONS.items():
            with formatter.section(heading):
                formatter.write_dl([(name.ljust(_NAME_WIDTH), text) for name, (_, text) in commands.items()])

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Complete the names of commands without importing them, and the options."""
        from click.shell_completion import CompletionItem  # noqa: PLC0415

        commands = [
            CompletionItem(name, help=text) for name, (_, text) in COMMANDS.items() if name.startswith(incomplete)
        ]
        return [*commands, *click.Command.shell_complete(self, ctx, incomplete)]

    def make_context(self, *args: Any, **options: Any) -> click.Context:
        with _error_reports():  # --help writes output here
            return super().make_context(*args, **options)

    def invoke(self, ctx: click.Context) -> Any:
        with _error_reports(ctx):
            try:
                return super().invoke(ctx)
            except click.UsageError as error:
                from gpufn.cli.terminal.suggestions import usage_hint  # noqa: PLC0415

                message = error.format_message()
                if hint := usage_hint(message, ctx.meta.get(_ARGV, [])):
                    message = message.removesuffix(".") + hint
                if _wants_json(ctx):
                    from gpufn.cli.terminal.output import WrongUsage  # noqa: PLC0415

                    raise WrongUsage(message) from error
                if not hint:
                    raise
                raise click.UsageError(message, error.ctx) from error


def import_module(module: str, command: str) -> ModuleType:
    """Import the module of `command`. Raises GpufnError if it needs the platform, which is not installed here."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in _PLATFORM:
            raise
        from gpufn_core.errors import GpufnError  # noqa: PLC0415

        raise GpufnError(f"gpufn {command} needs the platform on this machine: pip install gpufn-platform") from error


def _wants_json(ctx: click.Context) -> bool:
    """Return whether the command line has --json, even if it could not be parsed."""
    argv: list[str] = ctx.meta.get(_ARGV, [])
    return "--json" in (argv[: argv.index("--")] if "--" in argv else argv)


@contextlib.contextmanager
def _error_reports(ctx: click.Context | None = None) -> Iterator[None]:
    """Turn an error into one line and an exit code. A closed pipe, as behind `| head`, ends the command with code 0."""
    try:
        yield
    except BrokenPipeError as error:
        _discard(sys.stdout)
        raise click.exceptions.Exit(0) from error
    except KeyboardInterrupt as error:  # click would print "Aborted!" and exit with code 1
        raise click.exceptions.Exit(130) from error
    except click.exceptions.Exit:
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
        raise click.exceptions.Exit(code) from error


def _version(context: click.Context, param: click.Parameter, show: bool) -> None:
    if show and not context.resilient_parsing:
        import gpufn  # noqa: PLC0415

        sys.stdout.write(f"gpufn {gpufn.__version__}\n")
        sys.stdout.flush()
        context.exit()


@click.group(
    "gpufn",
    cls=LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"], "show_default": True},
    epilog=f"--debug, anywhere, shows the traceback of an error. Exit codes on failure: {_EXIT_CODES}.",
)
@click.option(
    "--url", metavar="<str>", help="Address of the gateway. Default: GPUFN_URL, else the one on this machine."
)
@click.option(
    "--version", is_flag=True, is_eager=True, expose_value=False, callback=_version, help="Show the version of gpufn."
)
def app(url: str | None) -> None:
    """Serverless GPU functions on your own machines."""
    if url:
        from gpufn.cli.terminal.output import as_usage_error  # noqa: PLC0415
        from gpufn_core.encoding.urls import gateway_address  # noqa: PLC0415

        with as_usage_error("--url"):
            gateway_address(url)
        os.environ["GPUFN_URL"] = url


def main() -> NoReturn:
    # httpx imports its own command line, with rich and Pygments, which takes a fifth of the time of a quick command.
    # It does without if that import fails, as None makes it.
    sys.modules.setdefault("httpx._main", None)  # type: ignore[arg-type]
    _open_streams()
    argv = sys.argv[1:]
    options = argv[: argv.index("--")] if "--" in argv else argv
    if "--debug" in options:
        argv.remove("--debug")
        os.environ["GPUFN_DEBUG"] = "1"
    try:
        app.main(args=argv, prog_name="gpufn", complete_var=COMPLETE)
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
