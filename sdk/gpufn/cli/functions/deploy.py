"""`gpufn deploy FILE` and `gpufn deploy MODEL`."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from gpufn.cli.models.options import (
    Gpu,
    IdleTimeout,
    MaxBatch,
    MaxWorkers,
    Memory,
    MinWorkers,
    ModelOptions,
    ParkTimeout,
    PrecisionOption,
    RequireGpu,
    Samples,
    ShapeOption,
    ToleranceOption,
    WorkerOptions,
    is_model,
    name_of,
    onnx_of,
)
from gpufn.cli.terminal.output import Json, as_typed, print_json, say, size, step
from gpufn_core.errors import Conflict, FunctionNotFound, GpufnError, InvalidSpec
from gpufn_core.spec.function_spec import Packaging

if TYPE_CHECKING:
    from gpufn.client.client import Client
    from gpufn.client.views import FunctionView
    from gpufn.deploy import bundle
    from gpufn.deploy.deployment import Deployable, Deployment
    from gpufn_core.spec.function_spec import FunctionSpec


def deploy(  # noqa: PLR0917  Typer passes them by name
    file: Annotated[
        str,
        typer.Argument(help="A Python file with @gpu_function in it; or a model, as MODEL.onnx or FILE.py:FACTORY."),
    ],
    name: Annotated[
        list[str] | None, typer.Option(help="Deploy only this one; may be given again. Of a model: its name.")
    ] = None,
    include: Annotated[
        list[str] | None,
        typer.Option(
            help="Also send the files that match this glob, such as 'data/*'. It is relative to the file's folder; for "
            "a file in a package, to the folder that holds the package. May be repeated."
        ),
    ] = None,
    precision: PrecisionOption = None,
    max_batch: MaxBatch = None,
    shape: ShapeOption = None,
    samples: Samples = None,
    tolerance: ToleranceOption = None,
    require_gpu: RequireGpu = False,
    gpu: Gpu = None,
    memory: Memory = None,
    min_workers: MinWorkers = None,
    max_workers: MaxWorkers = None,
    idle_timeout: IdleTimeout = None,
    park_timeout: ParkTimeout = None,
    wait: Annotated[
        bool, typer.Option("--wait/--no-wait", help="Return when calls go to the new revision, or at once.")
    ] = True,
    timeout: Annotated[
        float | None, typer.Option(help="Wait so many seconds; else the function's startup_timeout.", min=0)
    ] = None,
    check: Annotated[
        bool, typer.Option("--check/--no-check", help="Start a worker of the new revision before calls go there.")
    ] = True,
    force: Annotated[bool, typer.Option("--force", help="A new revision even when nothing changed.")] = False,
    replace: Annotated[
        bool, typer.Option("--replace", help="Replace a function that came from another file or project.")
    ] = False,
    json: Json = False,
) -> None:
    """Deploy the functions of a file, or a model.

    The file and the modules beside it that it imports are sent; other files only with --include. Models are sent and
    built: compiled for the devices that there are, checked and measured. A worker of the new revision is started, and
    calls stay with the old one until it is ready; a revision that cannot be built or start takes no calls, and the
    command fails. Where no node has room for that worker now, the command says so, and does not fail. Each function of
    a file is deployed on its own: a failure of one does not stop the others. A function that came from another file or
    project is replaced only with --replace. One whose code and options did not change keeps its revision and its
    workers, although other functions of the file changed; --force deploys it again.

    Packages that the file imports and that are not installed here get stand-ins, to read names, options and
    signatures. Type hints of these packages accept any argument at the gateway, and are checked in the worker.

    A model is a function without code, tensors in and tensors out: a client of the Open Inference Protocol calls it
    under /v2/models/NAME. FILE.py:FACTORY is a function that returns a torch module and example inputs.
    """
    from gpufn.client.client import Client  # noqa: PLC0415

    typed = ModelOptions(precision, max_batch, shape, samples, tolerance, require_gpu)
    workers = WorkerOptions(gpu, memory, min_workers, max_workers, idle_timeout, park_timeout)
    found_in = _of_model if is_model(file) else _of_file
    with found_in(file, name or [], include or [], typed, workers) as wanted, Client() as client:
        how = _How(wait=wait, timeout_s=timeout, force=force, check=check, replace=replace)
        _deploy(client, wanted, how, json=json)


class _How(NamedTuple):
    wait: bool
    timeout_s: float | None
    force: bool
    check: bool
    replace: bool


@contextlib.contextmanager
def _of_model(
    file: str, names: list[str], include: list[str], typed: ModelOptions, workers: WorkerOptions
) -> Iterator[list[Deployable]]:
    """Inside the `with`, for an exported model's file is gone afterwards."""
    from gpufn.deploy import deployment as _deployment  # noqa: PLC0415
    from gpufn.deploy.deploy_source import source_of_file  # noqa: PLC0415

    if include:
        raise typer.BadParameter("--include is for a file of functions; a model's weights are sent with it")
    with onnx_of(file) as onnx:
        with step(f"Reading {file}"), as_typed():
            options = {"name": _only(names) or name_of(file), **workers.given()}
            deployable = _deployment.deployable_model(typed.model(onnx), options)
            source = source_of_file(Path(file if Path(file).exists() else file.rpartition(":")[0]))
        yield [deployable._replace(source=source)]


@contextlib.contextmanager
def _of_file(
    file: str, names: list[str], include: list[str], typed: ModelOptions, workers: WorkerOptions
) -> Iterator[list[Deployable]]:
    from gpufn.deploy import bundle  # noqa: PLC0415
    from gpufn.deploy import deployment as _deployment  # noqa: PLC0415
    from gpufn.deploy.import_collector import check_globs, import_root  # noqa: PLC0415

    if given := [*typed.given(), *workers.given()]:
        option = given[0].removesuffix("_workers").replace("_", "-")
        raise typer.BadParameter(f"--{option} is for a model; the options of a function are in its file")
    path = Path(file)
    with as_typed():
        bundle.check_file(path)
        check_globs(import_root(path.resolve()), include)
    # What the file prints is no result of ours: with --json a program reads those.
    with step(f"Importing {file}"), contextlib.redirect_stdout(sys.stderr):
        project = bundle.load(path, to_run=False)
        functions = _chosen(project.functions, names, path)
        deployables = list(_deployment.deployables(functions, include))
    if project.missing:
        say(f"gpufn: warning: {file} is read without {', '.join(project.missing)}: not installed here", err=True)
    yield deployables


def _deploy(client: Client, wanted: list[Deployable], how: _How, *, json: bool) -> None:
    """A failure of one function does not stop the others; the command fails with it after them."""
    from gpufn.deploy import deployment as _deployment  # noqa: PLC0415

    made = []
    failures: list[Exception] = []
    for each in wanted:
        try:
            with step(f"Deploying {each.spec.name}, {size(each.size)}") as tell:
                deployment = _deployment.deploy(
                    client, each, force=how.force, check=how.check, replace=how.replace, on_progress=tell
                )
        except Conflict as error:
            failures.append(error)
            continue
        for warning in deployment.warnings():
            say(f"gpufn: warning: {warning}", err=True)
        made.append((each.spec, deployment))
    results: list[Any] = []
    for spec, deployment in made:
        try:
            view = _awaited(client, deployment, how.timeout_s) if how.wait else deployment.view
        except (GpufnError, TimeoutError) as error:
            failures.append(error)
            continue
        results.append(deployment if view is None else view)
        if json:
            continue
        if view is None:
            say(f"{spec.name}@{deployment.revision}  building: `gpufn builds` shows how far it is")
        else:
            _say(spec, view, client.url, is_new=deployment.is_new)
    if json:
        print_json(results)
    if failures:
        for failure in failures[:-1]:
            say(f"gpufn: {failure}", err=True)
        raise failures[-1]


def _awaited(client: Client, deployment: Deployment, timeout_s: float | None) -> FunctionView:
    from gpufn.cli.models.build_progress import watched  # noqa: PLC0415
    from gpufn.deploy import deployment as _deployment  # noqa: PLC0415
    from gpufn.deploy.check_wait import is_pending  # noqa: PLC0415

    view = deployment.view
    if view is None:
        with watched(deployment.builds) as seen:
            view = _deployment.wait_until_built(
                client, deployment.function, deployment.revision, timeout_s, on_builds=seen
            )
    if is_pending(view):
        with step(f"Starting {view.name}@{view.active}"):
            view = _deployment.finish_check(client, view, deployment.startup_timeout_s, timeout_s)
    if unchecked := _deployment.unchecked_warning(view):
        say(f"gpufn: warning: {unchecked}", err=True)
        return view
    if view.serving != view.active:
        patience_s = deployment.startup_timeout_s if timeout_s is None else timeout_s
        with step(f"Starting {view.name}@{view.active}") as tell:
            view = _deployment.wait_until_serving(client, view, patience_s, on_reason=tell)
    return view


def _only(names: list[str]) -> str:
    if len(names) > 1:
        raise typer.BadParameter("a model is deployed under one --name")
    return names[0] if names else ""


def _say(spec: FunctionSpec, view: FunctionView, url: str, *, is_new: bool) -> None:
    notes = "" if is_new else "  unchanged"
    if view.serving != view.active:
        notes += f"  {view.serving} serves until it is ready"
    for path in _paths(spec):
        say(f"{spec.name}@{view.active}  {url}{path}{notes}")


def _paths(spec: FunctionSpec) -> Iterator[str]:
    if spec.entry.packaging is Packaging.MODEL:
        yield f"/v2/models/{spec.name}/infer"
        return
    for method in spec.methods:
        yield f"/v1/functions/{f'{spec.name}.{method.name}' if method.name else spec.name}/invoke"


def _chosen(functions: list[bundle.AnyFunction], names: list[str], file: Path) -> list[bundle.AnyFunction]:
    if not functions:
        raise InvalidSpec(f"{file} declares no @gpu_function")
    by_name: dict[str, bundle.AnyFunction] = {}
    for function in functions:
        if by_name.setdefault(function.name, function) is not function:
            raise InvalidSpec(f"{file} declares two functions that are deployed as {function.name}: give one name=...")
    wanted = [wanted.replace("_", "-") for wanted in names] or list(by_name)
    if missing := [one for one in wanted if one not in by_name]:
        raise FunctionNotFound(f"{file} declares no {missing[0]}; it has {', '.join(by_name)}")
    return [by_name[one] for one in wanted]
