"""`gpufn submit`, `status`, `result`, `cancel`: submitted calls; `status` and `cancel` also accept maps."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gpufn.cli.calls.arguments import body_of, body_options, output_option, priority_option, show
from gpufn.cli.terminal.command import Argument, Command, FloatRange, connect, json_option
from gpufn.cli.terminal.name_completion import callable_name
from gpufn.cli.terminal.output import ago, duration, print_fields, print_json, print_table, say, say_or_json, step
from gpufn_core.encoding import media
from gpufn_core.errors import InvocationNotFound, MapNotFound
from gpufn_core.protocol.limits import LONGEST_TIMEOUT_S
from gpufn_core.spec.priority import Priority

if TYPE_CHECKING:
    from gpufn.client.views.calls import MapView

_call_or_map_id = click.argument("id", cls=Argument, help="Id of the call or map.")


@click.command(cls=Command)
@callable_name
@body_options
@click.option(
    "--timeout",
    type=FloatRange(0.001, LONGEST_TIMEOUT_S),
    help="Seconds after which the call expires, queued or running.",
)
@click.option("--webhook", help="URL that receives a webhook when the call ends.")
@priority_option
@json_option
def submit(
    *, name: str, timeout: float | None, webhook: str | None, priority: Priority | None, json: bool, **body_values: Any
) -> None:
    """Queue a call and print its id, for `gpufn result ID`."""
    body, content_type, query = body_of(**body_values)
    options: dict[str, Any] = {"timeout_s": timeout, "webhook": webhook, "priority": priority, "query": query}
    with connect() as client:
        view = client.submit(name, body, content_type, accept=media.JSON, **options)
    say_or_json(view.id, view, json=json)


@click.command(cls=Command)
@click.argument("id", cls=Argument, help="Id of the call, as `gpufn submit` prints it.")
@output_option
@click.option("--wait", is_flag=True, help="Wait until the call ends.")
@click.option(
    "--timeout", type=FloatRange(min=0), help="Maximum wait in seconds. Default: no wait, or no limit with --wait."
)
@json_option
def result(id: str, output: Path | None, wait: bool, timeout: float | None, json: bool) -> None:  # noqa: A002
    """Print the result of a submitted call, or its error.

    If the call has not ended, the command fails with exit code 1. --wait and --timeout wait for the end first;
    Ctrl-C ends the wait and not the call.
    """
    with connect() as client:
        try:
            with step(f"Waiting for {id}"):
                wait_s = None if wait and timeout is None else timeout or 0.0
                raw = client.result_raw(id, timeout_s=wait_s, accept=media.JSON)
        except KeyboardInterrupt:
            if not json:
                say(f"gpufn: the call continues; `gpufn result {id} --wait` prints its result", err=True)
            raise
        except TimeoutError:
            state = client.invocation(id).state.value
            raise TimeoutError(f"{id} is still {state}; `gpufn result {id} --wait` waits until it ends") from None
        except InvocationNotFound as error:
            with contextlib.suppress(MapNotFound):
                client.map(id)
                raise InvocationNotFound(
                    f"{id} is a map: `gpufn result {id}-0` prints the result of its first item, and "
                    f"`gpufn.Map.from_id({id!r})` reads all results"
                ) from None
            raise error from None
    show(raw, output, json=json)


@click.command(cls=Command)
@_call_or_map_id
@json_option
def status(id: str, json: bool) -> None:  # noqa: A002
    """Show the status of a submitted call or a map.

    For a call: its state, the reason if it waits, its worker and its attempts. For a map: the number of ended items.
    """
    with connect() as client:
        try:
            call = client.invocation(id)
        except InvocationNotFound as error:
            try:
                view = client.map(id)
            except MapNotFound:
                raise error from None
            _show_map(view, json=json)
            return
    if json:
        print_json(call)
        return
    progress = call.progress and f"{call.progress.fraction:.0%} {call.progress.message}".rstrip()
    print_fields(
        [
            ("call", f"{call.function}@{call.revision}"),
            ("state", call.state.value if call.attempt == 1 else f"{call.state.value}, attempt {call.attempt}"),
            ("priority", None if call.priority is Priority.NORMAL else call.priority.value),
            ("called by", call.parent),
            ("trace", call.trace),
            ("waiting", call.waiting and f"{call.waiting.detail} ({call.waiting.reason})"),
            ("queue position", call.place),
            ("starts in", None if call.eta_s is None else duration(call.eta_s)),
            ("worker", call.worker),
            ("progress", progress),
            ("submitted", ago(call.submitted_at)),
            ("timings", ", ".join(f"{phase.removesuffix('_s')} {duration(s)}" for phase, s in call.timings.items())),
            ("error", call.cause),
        ]
    )
    if len(call.attempts) > 1:
        rows = [
            (
                str(each.number),
                each.reason.value if each.reason else "",
                each.outcome.value,
                each.node,
                each.worker,
                each.message or each.code,
            )
            for each in call.attempts
        ]
        print_table(("attempt", "reason", "outcome", "node", "worker", "error"), rows, empty="")


def _show_map(view: MapView, *, json: bool) -> None:
    if json:
        print_json(view)
        return
    print_fields(
        [
            ("map", f"{view.function}@{view.revision}"),
            ("state", view.state),
            ("items", f"{view.ended:,} of {view.accepted:,} have ended"),
            ("submitted", ago(view.submitted_at)),
        ]
    )


@click.command(cls=Command)
@_call_or_map_id
@json_option
def cancel(id: str, json: bool) -> None:  # noqa: A002
    """Cancel a submitted call, or the remaining items of a map."""
    with connect() as client:
        try:
            cancelled = client.cancel(id)
        except InvocationNotFound as error:
            try:
                cancelled = client.cancel_map(id)
            except MapNotFound:
                raise error from None
    text = f"cancelled {id}" if cancelled else f"{id} had already ended"
    say_or_json(text, {"invocation": id, "cancelled": cancelled}, json=json)
