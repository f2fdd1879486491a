"""Builds for the CLI and `Client.deploy`: upload the files, wait for the build, explain a failure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

from gpufn.client.views.models import BuildView
from gpufn_core.domain.devices.engine import BuildState
from gpufn_core.errors import BuildFailed, ErrorInfo, GpufnError, error_from

_LONG_POLL_S = 30.0
_WAITING_POLL_S = 5.0  # another build may become the one ahead, which is no change of this build


class Uploads(Protocol):
    """The Client methods that `upload` needs."""

    def put_artifact(self, digest: str, path: Path, *, sent: Callable[[int], None]) -> bool: ...


class Builds(Protocol):
    """The Client methods that `wait_until_ended` needs."""

    def build(self, id: str, *, wait_s: float = 0.0, since: int | None = None) -> BuildView: ...  # noqa: A002


def upload(api: Uploads, paths: Mapping[str, Path], on_progress: Callable[[str], None] = lambda progress: None) -> None:
    """Upload the files that the gateway does not have."""
    for digest, path in paths.items():
        size = path.stat().st_size or 1

        def sent(count: int, name: str = path.name, size: int = size) -> None:
            if count < size:  # a small file is sent at once
                on_progress(f"uploading {name}, {count / size:.0%}")

        api.put_artifact(digest, path, sent=sent)


def wait_until_ended(
    api: Builds, build: BuildView, *, on_change: Callable[[BuildView], None] = lambda build: None
) -> BuildView:
    """Wait for the end of a build. `on_change` receives the build at each change.

    Raises BuildFailed if the build failed or was cancelled.
    """
    on_change(build)
    while not build.state.ended:
        poll_s = _WAITING_POLL_S if build.state is BuildState.PENDING else _LONG_POLL_S
        build = api.build(build.id, wait_s=poll_s, since=build.change)
        on_change(build)
    if build.state is BuildState.CANCELLED:
        raise BuildFailed(f"the build {build.id} was cancelled")
    if build.state is BuildState.FAILED:
        raise build_error(build.error)
    return build


def build_error(info: ErrorInfo | None) -> GpufnError:
    """Return the exception of a failed build: stage, node and message on one line, the compiler's log as a note."""
    error = error_from(info) if info is not None else BuildFailed()
    if not isinstance(error, BuildFailed):
        return error
    where = error.stage + (f", node {error.node}" if error.node and error.node not in error.message else "")
    failure = BuildFailed(
        f"{where}: {error.message}" if where else error.message, stage=error.stage, node=error.node, log=error.log
    )
    if error.log:
        failure.add_note(f"\nThe compiler's log:\n{error.log.rstrip()}")
    return failure
