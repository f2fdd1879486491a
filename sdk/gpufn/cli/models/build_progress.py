"""Progress of builds: bars at a terminal if rich is installed, otherwise one line per stage."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from gpufn.cli.terminal.escape import visible
from gpufn.cli.terminal.output import duration, is_animated, say
from gpufn_core.domain.devices.engine import BuildState

if TYPE_CHECKING:
    from gpufn.client.views.models import BuildAhead, BuildView

Show = Callable[[Sequence["BuildView"]], None]


@contextlib.contextmanager
def build_progress(ids: Sequence[str]) -> Iterator[Show]:
    """Yield a function that shows the builds `ids` on standard error. On an interrupt, print how to cancel them."""
    try:
        if is_animated():
            with _bars() as show:
                yield show
        else:
            yield _Lines()
    except KeyboardInterrupt:
        commands = " and ".join(f"`gpufn builds cancel {id_}`" for id_ in ids)
        message = (
            f"the build continues; cancel it with {commands}"
            if len(ids) == 1
            else f"the builds continue; cancel them with {commands}"
        )
        say(f"gpufn: {message}", err=True)
        raise


def describe_progress(build: BuildView) -> str:
    """Describe the progress of a build, such as `compile: onnxruntime-cpu`."""
    if build.state is BuildState.SUCCEEDED:
        return "; ".join(("reused" if build.cached else "built", *build.remarks))
    if build.state is BuildState.PENDING:
        return f"waiting: {build.detail}" if build.detail else f"waiting for a builder{_describe_ahead(build.ahead)}"
    if build.state is not BuildState.BUILDING:
        return build.state.value
    stage = build.stage.value if build.stage else "starting"
    return f"{stage}: {build.detail}" if build.detail else stage


def _describe_ahead(ahead: BuildAhead | None) -> str:
    if ahead is None:
        return ""
    name = f"{ahead.model} of {ahead.function}" if ahead.function else ahead.model
    return f", which has been building {name} for {duration(ahead.building_s)}"


class _Lines:
    def __init__(self) -> None:
        self._last: dict[str, Any] = {}

    def __call__(self, builds: Sequence[BuildView]) -> None:
        for build in builds:
            reason = (build.detail, build.ahead and build.ahead.id) if build.state is BuildState.PENDING else ()
            progress = build.state, build.stage, reason
            has_no_stage_yet = build.state is BuildState.BUILDING and build.stage is None
            if self._last.get(build.id) != progress and not has_no_stage_yet:
                self._last[build.id] = progress
                say(f"{build.label}: {describe_progress(build)}", err=True)


@contextlib.contextmanager
def _bars() -> Iterator[Show]:
    from rich.console import Console  # noqa: PLC0415
    from rich.live import Live  # noqa: PLC0415
    from rich.progress_bar import ProgressBar  # noqa: PLC0415
    from rich.table import Table  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    def render(builds: Sequence[BuildView]) -> Table:
        rows = Table.grid(padding=(0, 2))
        for build in builds:
            done = 1.0 if build.state is BuildState.SUCCEEDED else build.progress
            text = Text(visible(describe_progress(build)))
            rows.add_row(Text(visible(build.label)), ProgressBar(1.0, done, width=24), text)
        return rows

    with Live(console=Console(stderr=True), refresh_per_second=8) as live:
        yield lambda builds: live.update(render(builds))
