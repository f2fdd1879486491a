"""`gpufn calls NAME`."""

from __future__ import annotations

from typing import Annotated

import typer

from gpufn.cli._render import Json, ago, duration, print_json, print_table


def calls(
    name: Annotated[str, typer.Argument(help="The function's name.")],
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, help="So many at most.")] = 20,
    json: Json = False,
) -> None:
    """List a function's submitted calls, the newest first."""
    from gpufn._client import Client  # noqa: PLC0415

    with Client() as client:
        found = client.calls(name, limit=limit)
    if json:
        print_json(found)
        return
    rows = []
    for call in found:
        note = call.waiting.detail if call.waiting else (call.error or {}).get("message", "")
        first_line = (str(note).splitlines() or [""])[0]
        state = call.state.value if call.attempt == 1 else f"{call.state.value}, attempt {call.attempt}"
        rows.append((call.id, state, ago(call.submitted_at), duration(call.queue_s), duration(call.run_s), first_line))
    print_table(("id", "state", "submitted", "queued", "ran", "note"), rows, empty=f"{name} has no submitted calls")
