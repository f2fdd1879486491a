"""`gpufn deploy FILE`, `gpufn deploy MODEL`."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click
import msgspec

from gpufn.cli.models.options import (
    ModelOptions,
    WorkerOptions,
    check_trust,
    model_options,
    name_of,
    onnx_of,
    worker_options,
)
from gpufn.cli.terminal.command import PATH, Argument, Command, FloatRange, connect, json_option
from gpufn.cli.terminal.output import as_usage_error, print_json, say, size, step
from gpufn.deploy.convert.formats import Format, format_of
from gpufn.deploy.signing_key import read_signer
from gpufn_core.errors import Conflict, FunctionNotFound, GpufnError, InvalidSpec, RequestError
from gpufn_core.ids import new_ulid
from gpufn_core.spec.function_spec import Packaging
from gpufn_core.spec.naming.names import DEFAULT, Home, check_group
from gpufn_core.spec.web_spec import root_path

if TYPE_CHECKING:
    from gpufn.client.client import Client
    from gpufn.client.views.functions import FunctionView
    from gpufn.deploy import bundle
    from gpufn.deploy.deployables import Deployable
    from gpufn.deploy.deployment import Deployment
    from gpufn_core.spec.function_spec import FunctionSpec


@click.command(cls=Command)
@click.argument(
    "file",
    cls=Argument,
    type=click.Path(readable=False),  # for completion; a model is a path, or FILE.py:FACTORY
    help="Python file with @gpu_function, code for --as, or a model: a file of ONNX, torch or scikit-learn, a folder "
    "of MLflow, or FILE.py:FACTORY.",
)
@click.option(
    "--name", multiple=True, help="Function to deploy (default: all of the file; repeatable), or the name of a model."
)
@click.option(
    "--include",
    multiple=True,
    help="Glob of more files to send, such as 'data/*'. It is relative to the file's folder, or for a file in "
    "a package to the folder that contains the package. Repeatable.",
)
@click.option(
    "--as",
    "platform",
    type=click.Choice(["cog", "runpod"]),
    help="Deploy code of another platform: a folder with a cog.yaml, or a file with a RunPod handler.",
)
@model_options
@worker_options
@click.option("--wait/--no-wait", default=True, help="Wait until calls go to the new revision, or return at once.")
@click.option(
    "--timeout", type=FloatRange(min=0), help="Maximum wait in seconds. Default: the function's startup_timeout."
)
@click.option("--check/--no-check", default=True, help="Start a worker of the new revision before calls go there.")
@click.option("--force", is_flag=True, help="Create a new revision even if nothing changed.")
@click.option("--app", help="App of the functions that declare none. Default: `default`.")
@click.option("--env", help="Environment to deploy to. Default: GPUFN_ENV, else `default`.")
@click.option("--prune", is_flag=True, help="Remove the functions of the app that the file no longer has.")
@click.option("--traffic", help="Percentage of the calls for the new revision, such as 10%. Default: all of them.")
@click.option("--replace", is_flag=True, help="Replace a function that came from another file or project.")
@click.option(
    "--sign",
    type=PATH,
    help="File of the private key that signs the deploy, from `gpufn signing keygen`. Default: GPUFN_SIGNING_KEY.",
)
@json_option
def deploy(
    *,
    file: str,
    name: tuple[str, ...],
    include: tuple[str, ...],
    platform: str | None,
    wait: bool,
    timeout: float | None,
    json: bool,
    force: bool,
    check: bool,
    replace: bool,
    app: str | None,
    env: str | None,
    prune: bool,
    sign: Path | None,
    traffic: str | None,
    **options: Any,
) -> None:
    """Deploy the functions of a file, or a model.

    The command sends the file and the project's modules that it imports; other files only with --include. It sends
    models and builds their engines: compiled for the available devices, checked and measured. It starts a worker of the
    new revision; calls go to the old revision until that worker is ready. A revision that cannot be built or started
    gets no calls, and the command fails. If no node has room for the worker now, the command prints a warning and does
    not fail.

    The functions of a file are deployed independently: a failure of one does not stop the others. A function from
    another file or project is replaced only with --replace. A function whose code and options did not change keeps its
    revision and its workers, even if other functions of the file changed; --force deploys it again.

    Stand-ins replace packages that the file imports but that are not installed here, to read names, options and
    signatures. The gateway accepts any argument for type hints of these packages; the worker checks them.

    Functions belong to an app and an environment. The command lists the functions of the app that the file no longer
    has; --prune removes them. In the app `default`, only functions that came from the same file count.
    `gpufn apps rollback` undoes a deploy as a whole.

    A model is a function without code that maps tensors to tensors. Clients of the Open Inference Protocol call it
    under /v2/models/NAME. FILE.py:FACTORY is a function that returns a torch module and example inputs. Files of torch
    (.pt, .pt2) and scikit-learn (.skops, .joblib) are converted to ONNX. A folder of MLflow becomes a class with the
    method `predict`, which takes the JSON of MLflow's scoring server.

    With --as, code that was written for Replicate's cog or for RunPod is deployed as it is. A folder with a cog.yaml
    needs no --as.
    """
    if platform is None and (Path(file) / "cog.yaml").is_file():
        platform = "cog"
    for_model = ModelOptions(**{name: options.pop(name) for name in ModelOptions._fields})
    form = None if platform else format_of(file)
    if prune and (name or platform or form is not None):
        raise click.BadParameter("--prune is for all functions of a file: remove --name, or deploy a Python file")
    read = _read_file if form is None else _read_mlflow if form is Format.MLFLOW else _read_model
    if platform is not None:
        read = functools.partial(_read_hosted, platform)
    with as_usage_error("--sign"):
        signer = read_signer(sign)
    home = home_of_deploy(app, env)
    selection = _Selection(file, list(name), list(include), home)
    with read(selection, for_model, WorkerOptions(**options)) as deployables, connect() as client:
        deploy_options: dict[str, Any] = {"force": force, "check": check, "replace": replace, "signer": signer}
        if (percent := _percent(traffic)) is not None:
            deploy_options["traffic"] = percent
        _deploy(client, deployables, wait=wait, timeout_s=timeout, json=json, **deploy_options)
        if not name and form is None:
            _prune(client, deployables, file, is_wanted=prune)


class _Selection(NamedTuple):
    """The file, the names of its functions to deploy (empty for all), more files to send, and where they go."""

    file: str
    names: list[str]
    include: list[str]
    home: Home


def home_of_deploy(app: str | None, env: str | None) -> Home:
    """Return the app and environment to deploy to. Raises a usage error for names that are not valid."""
    environment = env or os.environ.get("GPUFN_ENV") or DEFAULT
    with as_usage_error("--env"):
        check_group("environment", environment)
    with as_usage_error("--app"):
        check_group("app", app or DEFAULT)
    return Home(environment, app or DEFAULT)


def _prune(client: Client, deployables: list[Deployable], file: str, *, is_wanted: bool) -> None:
    """List the functions of the deployed apps that the file no longer has, and delete them if `is_wanted`."""
    from gpufn.deploy.leftovers import leftovers  # noqa: PLC0415

    try:
        names = leftovers(client.functions(), deployables)
    except GpufnError:
        if is_wanted:
            raise
        return
    for name in names:
        if is_wanted:
            client.delete(name)
            say(f"deleted {name}, which {file} no longer has", err=True)
    if names and not is_wanted:
        say(f"gpufn: {file} no longer has {', '.join(names)}: remove with --prune", err=True)


@contextlib.contextmanager
def _read_model(
    selection: _Selection, model_options: ModelOptions, worker_options: WorkerOptions
) -> Iterator[list[Deployable]]:
    """Yield the model. An exported model's file is removed after the `with`."""
    from gpufn.deploy import deployables as _deployables  # noqa: PLC0415
    from gpufn.deploy.deploy_source import source_of_file  # noqa: PLC0415

    file, names, include, home = selection
    if include:
        raise click.BadParameter("--include is only for a file with functions; a model's weights are sent with it")
    with onnx_of(file, model_options) as onnx:
        with step(f"Reading {file}"), as_usage_error():
            options = {"name": _single(names) or name_of(file), **worker_options.specified()}
            deployable = _deployables.deployable_model(model_options.model(onnx), options, home)
            source = source_of_file(Path(file if Path(file).exists() else file.rpartition(":")[0]))
        yield [deployable._replace(source=source)]


@contextlib.contextmanager
def _read_mlflow(
    selection: _Selection, model_options: ModelOptions, worker_options: WorkerOptions
) -> Iterator[list[Deployable]]:
    """Yield the function that serves a folder of MLflow. Its file is removed after the `with`."""
    from gpufn.deploy.convert.mlflow_folder import app_of  # noqa: PLC0415
    from gpufn.deploy.deploy_source import source_of_file  # noqa: PLC0415

    file, names, include, home = selection
    check_trust(file, Format.MLFLOW, model_options)
    if options := [name for name in model_options.specified() if name != "trust_model"]:
        option = options[0].replace("_", "-")
        raise click.BadParameter(f"--{option} is for models that become ONNX; MLflow computes this one")
    name = _single(names) or name_of(file)
    source = source_of_file(Path(file, "MLmodel"))
    with app_of(Path(file), {"name": name, **worker_options.specified()}) as app:
        yield [each._replace(source=source) for each in read_functions(str(app), [], include, home)]


@contextlib.contextmanager
def _read_file(
    selection: _Selection, model_options: ModelOptions, worker_options: WorkerOptions
) -> Iterator[list[Deployable]]:
    file, names, include, home = selection
    if options := [*model_options.specified(), *worker_options.specified()]:
        option = options[0].removesuffix("_workers").replace("_", "-")
        raise click.BadParameter(f"--{option} is only for a model; set the options of a function in its file")
    yield read_functions(file, names, include, home)


@contextlib.contextmanager
def _read_hosted(
    platform: str, selection: _Selection, model_options: ModelOptions, worker_options: WorkerOptions
) -> Iterator[list[Deployable]]:
    """Yield the function of code that was written for another platform."""
    from gpufn.hosted import deploying  # noqa: PLC0415

    file, names, include, home = selection
    if options := model_options.specified():
        raise click.BadParameter(f"--{options[0].replace('_', '-')} is only for a model")
    read = {"cog": deploying.cog, "runpod": deploying.runpod}[platform]
    with step(f"Reading {file}"), contextlib.redirect_stdout(sys.stderr), as_usage_error():
        hosted = read(Path(file), _single(names), worker_options.specified(), include, home)
    for note in hosted.notes:
        say(f"gpufn: note: {note}", err=True)
    yield [hosted.deployable]


def read_functions(file: str, names: list[str], include: Sequence[str], home: Home) -> list[Deployable]:
    """Import a file and return its functions with these names (empty for all). Warn about packages that are not
    installed here."""
    from gpufn.deploy import bundle  # noqa: PLC0415
    from gpufn.deploy import deployables as _deployables  # noqa: PLC0415
    from gpufn.deploy.imports.import_collector import check_globs, import_root  # noqa: PLC0415

    path = Path(file)
    with as_usage_error():
        bundle.check_file(path)
        check_globs(import_root(path.resolve()), include)
    # Standard output is for the command's results, which programs parse with --json; not for prints of the file.
    with step(f"Importing {file}", has_lines=True) as update, contextlib.redirect_stdout(sys.stderr):
        project = bundle.load(path, to_run=False)
        functions = _select(project.functions, names, path)
        deployables = list(_deployables.deployables(functions, include, home, update))
    if project.missing:
        say(f"gpufn: warning: imported {file} without {', '.join(project.missing)}: not installed here", err=True)
    return deployables


def _deploy(
    client: Client, deployables: list[Deployable], *, wait: bool, timeout_s: float | None, json: bool, **options: Any
) -> None:
    """Deploy functions, and wait until they serve. The command fails with the failures afterwards."""
    deployments, failures = _create_revisions(client, deployables, options)
    results: list[Any] = []
    for number, (spec, deployment) in enumerate(deployments):
        try:
            view = wait_until_served(client, deployment, timeout_s) if wait else deployment.view
        except (GpufnError, TimeoutError) as error:
            failures.append(error)
            continue
        except KeyboardInterrupt:
            names = ", ".join(f"{each.function}@{each.revision}" for _, each in deployments[number:])
            say(f"gpufn: the deploy of {names} continues: see `gpufn ls`", err=True)
            raise
        results.append(deployment if view is None else view)
        if json:
            continue
        if view is None:
            signed = _signed(deployment)
            say(f"{spec.name}@{deployment.revision}  building: `gpufn builds` shows the progress{signed}")
        else:
            _print_addresses(spec, view, client.url, deployment)
    if json:
        print_json(results)
    if failures:
        for failure in failures[:-1]:
            say(f"gpufn: {failure}", err=True)
        raise failures[-1]


def _create_revisions(
    client: Client, deployables: list[Deployable], options: dict[str, Any]
) -> tuple[list[tuple[FunctionSpec, Deployment]], list[Exception]]:
    """Create the revisions in order, until a function comes from another source: this may be the wrong file. A function
    that is refused for another reason, such as a missing secret, does not stop the others."""
    from gpufn.deploy import deployment as _deployment  # noqa: PLC0415

    deployments: list[tuple[FunctionSpec, Deployment]] = []
    failures: list[Exception] = []
    deploy_id = new_ulid()
    for number, each in enumerate(deployables, 1):
        try:
            with step(f"Deploying {each.spec.name}, {size(each.size)}", has_lines=True) as update:
                deployment = _deployment.deploy(client, each, **options, deploy_id=deploy_id, on_progress=update)
        except RequestError as error:
            failures.append(error)
            if not isinstance(error, Conflict) or error.field != "replace":
                continue
            error.message = error.message.replace('"replace": true', "--replace")  # the gateway names its own option
            error.args = (error.message,)
            if left := [other.spec.name for other in deployables[number:]]:
                say(f"gpufn: not deployed: {', '.join(left)}", err=True)
            break
        for warning in deployment.warnings():
            say(f"gpufn: warning: {warning}", err=True)
        deployments.append((each.spec, deployment))
    return deployments, failures


def wait_until_served(client: Client, deployment: Deployment, timeout_s: float | None) -> FunctionView:
    """Wait for the builds, the check and the rollout of a revision, with their progress."""
    from gpufn.cli.models.build_progress import build_progress  # noqa: PLC0415
    from gpufn.deploy import deployment as _deployment  # noqa: PLC0415
    from gpufn.deploy.check_wait import is_pending  # noqa: PLC0415

    view = deployment.view
    if view is None:
        with build_progress(deployment.builds) as show:
            view = _deployment.wait_until_built(
                client, deployment.function, deployment.revision, timeout_s, on_builds=show
            )
    if view.canary is not None:
        return _wait_until_checked(client, view, deployment.startup_timeout_s, timeout_s)
    if is_pending(view):
        with step(f"Starting {view.name}@{view.active}", has_lines=True) as update:
            view = _deployment.finish_check(client, view, deployment.startup_timeout_s, timeout_s, on_reason=update)
    if warning := _deployment.unchecked_warning(view):
        say(f"gpufn: warning: {warning}", err=True)
        return view
    if view.serving != view.active:
        limit_s = deployment.startup_timeout_s if timeout_s is None else timeout_s
        with step(f"Starting {view.name}@{view.active}", has_lines=True) as update:
            view = _deployment.wait_until_serving(client, view, limit_s, on_reason=update)
    return view


def _wait_until_checked(
    client: Client, view: FunctionView, startup_timeout_s: float, timeout_s: float | None
) -> FunctionView:
    """Wait until a worker of a revision with a part of the calls has started."""
    from gpufn.deploy import check_wait  # noqa: PLC0415
    from gpufn_core.domain.revision import Check, CheckState  # noqa: PLC0415

    assert view.canary is not None
    pending = msgspec.structs.replace(view, active=view.canary, check=Check(CheckState.PENDING))
    with step(f"Starting {view.name}@{view.canary}"):
        check_wait.wait_until_checked(client, pending, startup_timeout_s, timeout_s)
    return view


def _percent(text: str | None) -> int | None:
    """Parse a part of the calls, such as 10%."""
    if text is None:
        return None
    number = text.strip().removesuffix("%")
    if not (number.isascii() and number.isdigit() and len(number) < 3 and int(number)):
        raise click.BadParameter("--traffic is 1% to 99% of the calls")
    return int(number)


def _single(names: list[str]) -> str:
    if len(names) > 1:
        raise click.BadParameter("a model has only one --name, and so has code for --as")
    return names[0] if names else ""


def _print_addresses(spec: FunctionSpec, view: FunctionView, url: str, deployment: Deployment) -> None:
    notes = "" if deployment.is_new else "  unchanged"
    if deployment.is_promoted:
        notes = "  had a part of the calls, gets all"
    if view.serving != view.active:
        notes += f"  {spec.name}@{view.serving} serves until it is ready"
    number = view.active
    if view.canary is not None:
        number, notes = view.canary, f"{notes}  gets a part of the calls: `gpufn traffic {spec.name}`"
    notes += _signed(deployment)
    for path in call_paths(spec):
        say(f"{spec.name}@{number}  {url}{path}{notes}")


def _signed(deployment: Deployment) -> str:
    return f"  signed by key {deployment.signed_by}" if deployment.signed_by else ""


def call_paths(spec: FunctionSpec) -> Iterator[str]:
    """Yield where the gateway takes calls of a function, or of each method of a class."""
    if spec.entry.packaging is Packaging.MODEL:
        yield f"/v2/models/{spec.name}/infer"
        return
    if spec.web is not msgspec.UNSET:
        yield f"{root_path(spec.name)}/"
        return
    for method in spec.methods:
        yield f"/v1/functions/{f'{spec.name}.{method.name}' if method.name else spec.name}/invoke"


def _select(functions: list[bundle.AnyFunction], names: list[str], file: Path) -> list[bundle.AnyFunction]:
    if not functions:
        raise InvalidSpec(f"{file} declares no @gpu_function: decorate a function, or start from `gpufn init`")
    by_name: dict[str, bundle.AnyFunction] = {}
    for function in functions:
        if by_name.setdefault(function.name, function) is not function:
            raise InvalidSpec(f"{file} declares two functions named {function.name}: set name=... on one of them")
    if not names:
        return list(by_name.values())
    selected = [
        function for name in names for function in by_name.values() if name.replace("_", "-") in _spellings(function)
    ]
    if missing := [name for name in names if not any(name.replace("_", "-") in _spellings(each) for each in selected)]:
        raise FunctionNotFound(f"{file} does not declare {missing[0]}; it declares {', '.join(by_name)}")
    return list(dict.fromkeys(selected))


def _spellings(function: bundle.AnyFunction) -> tuple[str, str]:
    """The names of a function on the command line: with its app and without."""
    return function.name, function.name.rpartition("/")[2]
