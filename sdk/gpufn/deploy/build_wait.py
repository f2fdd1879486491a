"""Builds as the CLI and `Client.deploy` see them: what is uploaded before, the wait, and why one failed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

from gpufn.client.views import BuildView
from gpufn_core.domain.engine import BuildState
from gpufn_core.errors import BuildFailed, ErrorInfo, GpufnError, error_from

_LONGEST_WAIT_S = 30.0  # of one request


class Uploads(Protocol):
    """What is asked of a Client."""

    def put_artifact(self, digest: str, path: Path, *, sent: Callable[[int], None]) -> bool: ...


class Builds(Protocol):
    """What is asked of a Client."""

    def build(self, id: str, *, wait_s: float = 0.0, since: int | None = None) -> BuildView: ...  # noqa: A002


def upload(api: Uploads, paths: Mapping[str, Path], told: Callable[[str], None] = lambda progress: None) -> None:
    """The files that the gateway lacks."""
    for digest, path in paths.items():
        size = path.stat().st_size or 1

        def sent(count: int, name: str = path.name, size: int = size) -> None:
            told(f"{name} {count / size:.0%}")

        api.put_artifact(digest, path, sent=sent)


def wait_until_ended(
    api: Builds, build: BuildView, *, seen: Callable[[BuildView], None] = lambda build: None
) -> BuildView:
    """`seen` gets the build at each of its changes. Raises BuildFailed, also when it was cancelled."""
    seen(build)
    while not build.state.ended:
        build = api.build(build.id, wait_s=_LONGEST_WAIT_S, since=build.change)
        seen(build)
    if build.state is BuildState.CANCELLED:
        raise BuildFailed(f"the build {build.id} was cancelled")
    if build.state is BuildState.FAILED:
        raise build_error(build.error)
    return build


def build_error(info: ErrorInfo | None) -> GpufnError:
    """Why a build failed: its stage, its node and the message on one line; the compiler's log is a note."""
    error = error_from(info) if info is not None else BuildFailed()
    if not isinstance(error, BuildFailed):
        return error
    where = error.stage + (f", node {error.node}" if error.node and error.node not in error.message else "")
    told = BuildFailed(
        f"{where}: {error.message}" if where else error.message, stage=error.stage, node=error.node, log=error.log
    )
    if error.log:
        told.add_note(f"\nThe compiler's log:\n{error.log.rstrip()}")
    return told
