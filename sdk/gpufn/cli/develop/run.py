"""`gpufn run FILE[::FUNCTION]`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click
import msgspec

from gpufn.cli.calls.arguments import check_output, output_option, show
from gpufn.cli.calls.invoke import print_items
from gpufn.cli.calls.wait_reasons import report_waits
from gpufn.cli.develop.follow_logs import LogFollower, drain
from gpufn.cli.develop.parameters import arguments_of
from gpufn.cli.develop.temporary import Temporary, development_version, temporary
from gpufn.cli.functions.deploy import read_functions, wait_until_served
from gpufn.cli.terminal.command import Argument, Command, FloatRange, connect, json_option
from gpufn.cli.terminal.output import WrongUsage, as_usage_error, say, size, step
from gpufn.deploy.signing_key import read_signer
from gpufn_core.encoding import media
from gpufn_core.errors import FunctionNotFound
from gpufn_core.ids import new_ulid
from gpufn_core.protocol.limits import LONGEST_TIMEOUT_S
from gpufn_core.spec.function_spec import MethodSpec
from gpufn_core.spec.naming.names import Home, check_group, function_name, parts_of
from gpufn_core.spec.naming.temporary_names import run_environment

if TYPE_CHECKING:
    from gpufn.client.client import Client
    from gpufn.deploy.deployables import Deployable
    from gpufn_core.protocol.messages import LogLine


class Target(NamedTuple):
    """The function of a file that is called, and its method."""

    deployable: Deployable
    method: MethodSpec

    @property
    def name(self) -> str:
        name = self.deployable.spec.name
        return f"{name}.{self.method.name}" if self.method.name else name


@click.command(cls=Command, context_settings={"allow_interspersed_args": False})
@click.argument(
    "target",
    cls=Argument,
    metavar="FILE[::FUNCTION]",
    type=click.Path(readable=False),  # for completion
    help="Python file, with ::FUNCTION or ::CLASS.METHOD if it declares several.",
)
@click.argument(
    "arguments",
    cls=Argument,
    nargs=-1,
    type=click.UNPROCESSED,
    help="The parameters as options: --NAME VALUE. --help lists them.",
)
@click.option("--env", help="Environment to run in. Default: a new one.")
@click.option("--include", multiple=True, help="Glob of more files to send, as for `gpufn deploy`. Repeatable.")
@click.option("--timeout", type=FloatRange(0.001, LONGEST_TIMEOUT_S), help="Timeout of the call in seconds.")
@output_option
@json_option
@click.pass_context
def run(
    context: click.Context,
    *,
    target: str,
    arguments: tuple[str, ...],
    env: str | None,
    include: tuple[str, ...],
    timeout: float | None,
    output: Path | None,
    json: bool,
) -> None:
    """Call a function of a file without deploying it for good.

    The command deploys the file's functions to an environment of their own, calls one of them, and deletes them again.
    Options of this command stand before the file, and the function's parameters after it: `gpufn run app.py::f --x 1`.
    A value is text, a number or JSON, as the parameter's type says; @FILE reads it from a file. The result goes to
    standard output, what the function prints to standard error. Schedules do not run.
    """
    file, _, wanted = target.partition("::")
    if env is not None:
        with as_usage_error("--env"):
            check_group("environment", env)
    check_output(output)
    with as_usage_error():
        signer = read_signer(None)
    home = Home(env or run_environment(new_ulid()))
    deployables = [development_version(each) for each in read_functions(file, [], list(include), home)]
    called = find_target(deployables, wanted, file)
    words = arguments[1:] if arguments[:1] == ("--",) else arguments
    body = msgspec.json.encode(arguments_of(_usage(file, called), called.method, words, context.parent))
    with connect() as client, temporary(client) as functions:
        followers = _deploy(client, functions, deployables, called, {"signer": signer}, json=json)
        options: dict[str, Any] = {"timeout_s": timeout}
        with contextlib.ExitStack() as stack:
            for follower in followers:
                stack.callback(follower.stop)
            stack.callback(drain, client, followers)  # before the stops, and before the functions are deleted
            if called.method.kind.streams and not json:
                print_items(client.stream_json(called.name, body, media.JSON, **options), output)
                return
            name = called.deployable.spec.name
            with step(f"Calling {_shown(name)}") as update, report_waits(client, name, update, json=json):
                result = client.invoke_raw(called.name, body, media.JSON, **options)
        show(result, output, json=json)


def _deploy(
    client: Client,
    functions: Temporary,
    deployables: list[Deployable],
    called: Target,
    options: dict[str, Any],
    *,
    json: bool,
) -> list[LogFollower]:
    """Deploy all functions, since the called one may call others. Only the called one is checked."""
    from gpufn.deploy import deployment as _deployment  # noqa: PLC0415

    deploy_id, deployments, followers = new_ulid(), [], []
    has_prefix = len(deployables) > 1
    # The called one last, because its check starts its worker, which may call the others.
    for each in sorted(deployables, key=lambda each: each is called.deployable):
        name, is_called = each.spec.name, each is called.deployable
        functions.add(name)
        with step(f"Deploying {_shown(name)}, {size(each.size)}") as update:
            deployment = _deployment.deploy(
                client, each, check=is_called, deploy_id=deploy_id, lease=functions.lease, on_progress=update, **options
            )
        if deployment.view is not None:
            functions.on_deployed(name)
        deployments.append(deployment)
        for warning in deployment.warnings() if is_called else ():
            say(f"gpufn: warning: {warning}", err=True)
    for deployment in deployments:
        if deployment.view is None or deployment.function == called.deployable.spec.name:
            wait_until_served(client, deployment, None)
        if not json:
            followers.append(LogFollower(deployment.function, deployment.revision, _printer(has_prefix)))
    return followers


def _printer(has_prefix: bool) -> Any:
    def show_line(line: LogLine) -> None:
        if line.stream != "error":  # the command reports the error of the call itself
            prefix = f"{_shown(line.function)} | " if has_prefix else ""
            say(f"{prefix}{line.text.rstrip()}", err=True)

    return show_line


def find_target(deployables: list[Deployable], wanted: str, file: str) -> Target:
    """Return the function, and the method of a class, that `wanted` names; with "", the only one.

    Raises FunctionNotFound, and WrongUsage if there are several.
    """
    name, _, method = wanted.partition(".")
    fitting = [each for each in deployables if not name or name in _spellings(each)]
    if not fitting:
        raise FunctionNotFound(f"{file} does not declare {name}; it declares {', '.join(_declared(deployables))}")
    if len(fitting) > 1:
        choices = ", ".join(f"{file}::{each}" for each in _declared(fitting))
        raise WrongUsage(f"{file} declares several functions: name one of {choices}")
    methods = [each for each in fitting[0].spec.methods if not method or each.name == method]
    (declared,) = _declared(fitting)
    if not methods:
        known = ", ".join(each.name for each in fitting[0].spec.methods if each.name) or "none"
        raise FunctionNotFound(f"{declared} has no method {method}; it has {known}")
    if len(methods) > 1:
        choices = ", ".join(f"{file}::{declared}.{each.name}" for each in methods)
        raise WrongUsage(f"{declared} has several methods: name one of {choices}")
    return Target(fitting[0], methods[0])


def _declared(deployables: list[Deployable]) -> Iterator[str]:
    return (each.spec.entry.qualname or parts_of(each.spec.name).base for each in deployables)


def _spellings(deployable: Deployable) -> tuple[str, str, str]:
    base = parts_of(deployable.spec.name).base
    return deployable.spec.entry.qualname, base, base.replace("-", "_")


def _usage(file: str, called: Target) -> str:
    method = f".{called.method.name}" if called.method.name else ""
    return f"run {file}::{called.deployable.spec.entry.qualname}{method}"


def _shown(name: str) -> str:
    return function_name(parts_of(name).base)
