"""Builds as they go on: bars at a terminal, else a line for each stage that is reached."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from gpufn.cli.terminal.escape import visible
from gpufn.cli.terminal.output import say
from gpufn_core.domain.engine import BuildState

if TYPE_CHECKING:
    from gpufn.client.views import BuildView

Seen = Callable[[Sequence["BuildView"]], None]


@contextlib.contextmanager
def watched(ids: Sequence[str]) -> Iterator[Seen]:
    """What it yields shows builds, on standard error. An interrupt says that they go on; `ids` are theirs."""
    try:
        if sys.stderr.isatty():
            with _bars() as seen:
                yield seen
        else:
            yield _Lines()
    except KeyboardInterrupt:
        commands = " and ".join(f"`gpufn builds cancel {id_}`" for id_ in ids)
        goes_on = (
            f"the build goes on; {commands} ends it" if len(ids) == 1 else f"the builds go on; {commands} end them"
        )
        say(f"gpufn: {goes_on}", err=True)
        raise


def phrase(build: BuildView) -> str:
    """Where a build is, in words: `compile: onnxruntime-cpu`."""
    if build.state is BuildState.SUCCEEDED:
        return "built before" if build.cached else "built"
    if build.state is BuildState.PENDING:
        return f"waits: {build.detail}" if build.detail else "waits for a builder"
    if build.state is not BuildState.BUILDING:
        return build.state.value
    stage = build.stage.value if build.stage else "starts"
    return f"{stage}: {build.detail}" if build.detail else stage


class _Lines:
    def __init__(self) -> None:
        self._said: dict[str, Any] = {}

    def __call__(self, builds: Sequence[BuildView]) -> None:
        for build in builds:
            reached = build.state, build.stage, build.detail if build.state is BuildState.PENDING else ""
            has_begun_only = build.state is BuildState.BUILDING and build.stage is None
            if self._said.get(build.id) != reached and not has_begun_only:
                self._said[build.id] = reached
                say(f"{build.label}: {phrase(build)}", err=True)


@contextlib.contextmanager
def _bars() -> Iterator[Seen]:
    from rich.console import Console  # noqa: PLC0415
    from rich.live import Live  # noqa: PLC0415
    from rich.progress_bar import ProgressBar  # noqa: PLC0415
    from rich.table import Table  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    def drawn(builds: Sequence[BuildView]) -> Table:
        rows = Table.grid(padding=(0, 2))
        for build in builds:
            done = 1.0 if build.state is BuildState.SUCCEEDED else build.progress
            rows.add_row(Text(visible(build.label)), ProgressBar(1.0, done, width=24), Text(visible(phrase(build))))
        return rows

    with Live(console=Console(stderr=True), refresh_per_second=8) as live:
        yield lambda builds: live.update(drawn(builds))
