"""`gpufn ls`, `describe`, `scale`, `rollback`, `rm`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from gpufn.cli.terminal.command import Command, IntRange, connect, json_option, yes_option
from gpufn.cli.terminal.name_completion import function_name
from gpufn.cli.terminal.output import (
    ago,
    as_usage_error,
    confirm,
    duration,
    print_fields,
    print_json,
    print_table,
    say,
    say_or_json,
    size,
    step,
)
from gpufn_core.spec.naming.variant_names import described, function_of
from gpufn_core.spec.priority import Priority
from gpufn_core.spec.web_spec import root_path

if TYPE_CHECKING:
    from gpufn.client.views.functions import FunctionView
    from gpufn_core.domain.traffic import HeaderRule


@click.command(cls=Command)
@json_option
def ls(json: bool) -> None:
    """List the functions.

    The counts of queued and running calls are updated once a second, so a call that has just ended may be included.
    """
    with connect() as client:
        views = client.functions()
    if json:
        print_json(views)
        return
    print_table(
        ("name", "revision", "workers", "queued", "running", "updated", "note"),
        [
            (
                view.name,
                _revision_or_split(view),
                view.workers,
                _known(view.queued),
                _known(view.running),
                ago(view.updated_at),
                view.note,
            )
            for view in views
        ],
        empty="no functions: deploy some with `gpufn deploy FILE`",
    )


@click.command(cls=Command)
@function_name
@click.option("--env-values", is_flag=True, help="Show the values of env too. Needs the scope deploy.")
@json_option
def describe(name: str, env_values: bool, json: bool) -> None:
    """Show a function's revision, workers and options."""
    with connect() as client:
        view = client.function(name, env_values=env_values)
        if json:
            print_json(view)
            return
        revisions = client.revisions(name)
        url = client.url
    spec = view.spec
    resources, scaling = spec.get("resources", {}), spec.get("scaling", {})
    methods = [method.get("name", "") for method in spec.get("methods", [])]
    bounds = [
        f"{override if override is not None else scaling.get(key)}{'' if override is None else ' (gpufn scale)'}"
        for key, override in (("min_workers", view.min_workers), ("max_workers", view.max_workers))
    ]
    print_fields(
        [
            ("name", view.name),
            ("address", f"{url}{_path(view.name, spec)}"),
            ("access", "for everybody, without a key" if spec.get("web", {}).get("public") else ""),
            ("methods", ", ".join(filter(None, methods))),
            ("revision", _revision(view)),
            ("traffic", view.traffic and str(view.traffic)),
            ("headers", view.traffic and ", ".join(map(_header, view.traffic.headers))),
            ("source", view.source and str(view.source)),
            ("deployed", _deployed(view)),
            ("temporary", view.lease and not view.variant and "deleted when its client ends"),
            ("terminal", view.variant and view.variant.is_terminal and f"of {function_of(view.name)}"),
            ("variant", _variant(view)),
            ("workers", view.workers),
            ("calls", f"{_known(view.queued)} queued, {_known(view.running)} running"),
            ("note", view.note),
            ("call duration", view.service_s and duration(view.service_s)),
            ("cold start", view.cold_start_s and duration(view.cold_start_s)),
            ("gpu", " or ".join(resources.get("gpu", [])) and f"{' or '.join(resources['gpu'])}, {resources['share']}"),
            ("nodes", f"{resources['nodes']} per worker" if resources.get("nodes", 1) > 1 else ""),
            ("cpu", resources.get("cpu")),
            ("memory", resources.get("memory_bytes") and size(resources["memory_bytes"])),
            ("min, max workers", ", ".join(bounds)),
            ("concurrency", spec.get("concurrency")),
            ("timeout", duration(spec.get("timeout_s"))),
            *_options(spec),
            ("env", ", ".join(f"{name}={value}" for name, value in spec.get("env", {}).items()) or ", ".join(view.env)),
            ("secrets", ", ".join(spec.get("secrets", ()))),
            ("revisions", ", ".join(f"{each.number} ({ago(each.created_at)})" for each in revisions[-5:])),
        ]
    )


def _path(name: str, spec: dict[str, Any]) -> str:
    if "web" in spec:
        return f"{root_path(name)}/"
    return f"/v1/functions/{name}{'.METHOD' if spec.get('is_class') else ''}/invoke"


def _options(spec: dict[str, Any]) -> list[tuple[str, Any]]:
    """Return the options that most functions do not set."""
    batch, retries, schedule, image = (spec.get(option) or {} for option in ("batch", "retries", "schedule", "image"))
    on = f", on {', '.join(retries['on'])}" if retries.get("on") else ""
    wait = batch.get("max_wait_ms") and f", waiting up to {duration(batch['max_wait_ms'] / 1000)}"
    lock = ["a lock file"] if image.get("lock") else []
    packages = ", ".join([*image.get("apt", ()), *image.get("pip", ()), *lock])
    base = image.get("base") or f"Python {image.get('python')}"
    priority = spec.get("priority")
    return [
        ("queue timeout", spec.get("queue_timeout_s") and duration(spec["queue_timeout_s"])),
        ("max variants", spec.get("max_variants")),
        ("max calls", spec.get("max_calls") and f"{spec['max_calls']:,} per worker"),
        ("batch", batch and f"up to {batch['max_size']} calls{wait or ''}"),
        ("retries", retries.get("attempts") and f"{retries['attempts']}, after {duration(retries['delay_s'])}{on}"),
        ("schedule", schedule and f"{schedule['cron']} {schedule.get('timezone', 'UTC')}"),
        ("webhook", spec.get("webhook")),
        ("priority", None if priority == Priority.NORMAL else priority),
        ("image", image and (f"{base} with {packages}" if packages else base)),
    ]


@click.command(cls=Command)
@function_name
@click.option("--min", "min_workers", type=IntRange(min=0), help="Minimum number of workers. Default: as deployed.")
@click.option("--max", "max_workers", type=IntRange(min=0), help="Maximum number of workers. Default: as deployed.")
@json_option
def scale(name: str, min_workers: int | None, max_workers: int | None, json: bool) -> None:
    """Set the minimum and maximum number of a function's workers.

    The setting applies until the next `gpufn scale`, also after deploys. Without --min and --max the function's own
    options apply again.
    """
    with connect() as client, as_usage_error():
        view = client.scale(name, min_workers, max_workers)
    if json:
        print_json(view)
        return
    scaling: dict[str, Any] = view.spec.get("scaling", {})
    low = scaling.get("min_workers") if view.min_workers is None else view.min_workers
    high = scaling.get("max_workers") if view.max_workers is None else view.max_workers
    if high == 0:
        say(f"{view.name} has no workers: its calls wait")
    else:
        say(f"{view.name} has {low if low == high else f'{low} to {high}'} worker{'s' if high != 1 else ''}")


@click.command(cls=Command)
@function_name
@click.option("--revision", type=int, help="Number of the revision. Default: the one before the active revision.")
@click.option("--wait/--no-wait", default=True, help="Wait until calls go to the revision, or return at once.")
@json_option
def rollback(name: str, revision: int | None, wait: bool, json: bool) -> None:
    """Make an earlier revision active."""
    from gpufn.declare.options import default_of  # noqa: PLC0415
    from gpufn.deploy import deployment  # noqa: PLC0415

    with connect() as client:
        view = client.rollback(name, revision)
        if wait and view.serving != view.active:
            limit_s = float(view.spec.get("startup_timeout_s") or default_of("startup_timeout"))
            with step(f"Starting {view.name}@{view.active}") as update:
                view = deployment.wait_until_serving(client, view, limit_s, on_reason=update)
    state = "is active" if view.serving != view.active else "serves"
    say_or_json(f"{view.name}@{view.active} {state}", view, json=json)


@click.command(cls=Command)
@function_name
@yes_option
@json_option
def rm(name: str, yes: bool, json: bool) -> None:
    """Delete a function. Queued calls are cancelled; running calls finish."""
    with connect() as client:
        view = client.function(name)
        confirm(f"Delete {view.name} with {_known(view.queued)} queued calls?", yes=yes)
        client.delete(view.name)
    say_or_json(f"deleted {view.name}", {"deleted": view.name}, json=json)


def _variant(view: FunctionView) -> str:
    if view.variant is None or view.variant.is_terminal:
        return ""
    return described(function_of(view.name), view.variant.parameters, view.variant.options)


def _revision(view: FunctionView) -> str:
    return str(view.active) if view.active == view.serving else f"{view.active} (still serving {view.serving})"


def _revision_or_split(view: FunctionView) -> str:
    return _revision(view) if view.traffic is None else str(view.traffic)


def _header(rule: HeaderRule) -> str:
    return f"{rule.name}={rule.value}: revision {rule.revision}"


def _deployed(view: FunctionView) -> str:
    """Format the last deploy, such as `ada@laptop, with the key 3f2a, 5 min ago`."""
    source = view.source
    by = () if source is None else (source.deployer, f"with the key {source.key}" if source.key else "")
    return ", ".join(filter(None, (*by, ago(view.deployed_at) if view.deployed_at else "")))


def _known(count: int | None) -> str:
    return "?" if count is None else str(count)
