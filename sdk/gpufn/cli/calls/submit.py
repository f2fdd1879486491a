"""`gpufn submit`, `status`, `result`, `cancel`: calls that nobody waits for; two of them for maps as well."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Annotated

import typer

from gpufn.cli.calls.arguments import Arguments, Class, Data, File, Output, body_of, show
from gpufn.cli.terminal.name_completion import CallableName
from gpufn.cli.terminal.output import Json, ago, duration, print_fields, print_json, print_table, say, step
from gpufn_core.encoding import media
from gpufn_core.errors import InvocationNotFound, MapNotFound
from gpufn_core.protocol.limits import LONGEST_TIMEOUT_S
from gpufn_core.spec.priority import Priority

if TYPE_CHECKING:
    from gpufn.client.views import MapView

Id = Annotated[str, typer.Argument(help="The invocation's id, which `gpufn submit` printed.")]


def submit(  # noqa: PLR0917  Typer passes them by name
    name: CallableName,
    arguments: Arguments = None,
    data: Data = None,
    file: File = None,
    timeout: Annotated[
        float | None,
        typer.Option(help="End it when it has not ended after so many seconds.", min=0.001, max=LONGEST_TIMEOUT_S),
    ] = None,
    webhook: Annotated[str | None, typer.Option(help="An address that is told when the call has ended.")] = None,
    priority: Class = None,
    json: Json = False,
) -> None:
    """Queue a call and print its id; `gpufn result ID` has its result later."""
    from gpufn.client.client import Client  # noqa: PLC0415

    body, content_type, query = body_of(arguments, data, file)
    with Client() as client:
        view = client.submit(
            name,
            body,
            content_type,
            accept=media.JSON,
            timeout_s=timeout,
            webhook=webhook,
            priority=priority,
            query=query,
        )
    if json:
        print_json(view)
    else:
        say(view.id)


def result(
    id: Id,  # noqa: A002
    output: Output = None,
    wait: Annotated[bool, typer.Option("--wait", help="Wait for its end.")] = False,
    timeout: Annotated[float | None, typer.Option(help="Wait for so many seconds at most.", min=0)] = None,
    json: Json = False,
) -> None:
    """Print the result of a submitted call, or how it failed.

    While it is queued or runs, it says so and ends with 1; with --wait or --timeout it waits.
    """
    from gpufn.client.client import Client  # noqa: PLC0415

    with Client() as client:
        try:
            with step(f"Waiting for {id}"):
                patience_s = None if wait and timeout is None else timeout or 0.0
                answer = client.result_raw(id, timeout_s=patience_s, accept=media.JSON)
        except TimeoutError:
            state = client.invocation(id).state.value
            raise TimeoutError(f"{id} is still {state}; `gpufn result {id} --wait` waits for its end") from None
        except InvocationNotFound as error:
            with contextlib.suppress(MapNotFound):
                client.map(id)
                raise InvocationNotFound(
                    f"{id} is a map: `gpufn result {id}-0` has the result of its first item, and "
                    f"`gpufn.Map.from_id({id!r})` those of all"
                ) from None
            raise error from None
    show(answer, output, json=json)


def status(id: Id, json: Json = False) -> None:  # noqa: A002
    """Say how a submitted call stands: why it waits, where it runs, how its attempts ended."""
    from gpufn.client.client import Client  # noqa: PLC0415

    with Client() as client:
        try:
            call = client.invocation(id)
        except InvocationNotFound as error:
            try:
                found = client.map(id)
            except MapNotFound:
                raise error from None
            _show_map(found, json=json)
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
            ("waits", call.waiting and f"{call.waiting.detail} ({call.waiting.reason})"),
            ("place", call.place),
            ("starts in", None if call.eta_s is None else duration(call.eta_s)),
            ("worker", call.worker),
            ("progress", progress),
            ("submitted", ago(call.submitted_at)),
            ("took", ", ".join(f"{phase.removesuffix('_s')} {duration(s)}" for phase, s in call.timings.items())),
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


def _show_map(found: MapView, *, json: bool) -> None:
    if json:
        print_json(found)
        return
    print_fields(
        [
            ("map", f"{found.function}@{found.revision}"),
            ("state", found.state),
            ("items", f"{found.ended:,} of {found.accepted:,} have ended"),
            ("submitted", ago(found.submitted_at)),
        ]
    )


def cancel(id: Id, json: Json = False) -> None:  # noqa: A002
    """Cancel a submitted call, queued or running, or what is left of a map."""
    from gpufn.client.client import Client  # noqa: PLC0415

    with Client() as client:
        try:
            cancelled = client.cancel(id)
        except InvocationNotFound as error:
            try:
                cancelled = client.cancel_map(id)
            except MapNotFound:
                raise error from None
    if json:
        print_json({"invocation": id, "cancelled": cancelled})
    else:
        say(f"cancelled {id}" if cancelled else f"{id} had ended already")
