"""`gpufn serve FILE`."""

from __future__ import annotations

import getpass
import importlib.util
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from gpufn.cli.develop import reload
from gpufn.cli.develop.follow_logs import LogFollower
from gpufn.cli.develop.reload import Event, Reload
from gpufn.cli.develop.temporary import Temporary, temporary
from gpufn.cli.develop.watch import Watch
from gpufn.cli.terminal.command import Argument, Command, connect
from gpufn.cli.terminal.output import as_line, as_usage_error, duration, say
from gpufn_core.errors import Conflict, Forbidden, GatewayUnavailable
from gpufn_core.spec.naming.names import Home, check_group, parts_of
from gpufn_core.spec.naming.temporary_names import development_environment

if TYPE_CHECKING:
    from gpufn.client.client import Client
    from gpufn_core.protocol.messages import LogLine

_POLL_S: Final = 0.03
_RETRY_S: Final = 1.0  # after a deploy that no gateway received


@click.command(cls=Command)
@click.argument("file", cls=Argument, type=click.Path(readable=False), help="Python file with @gpu_function.")
@click.option("--env", help="Environment to serve in. Default: dev-USER.")
@click.option("--include", multiple=True, help="Glob of more files to send, as for `gpufn deploy`. Repeatable.")
def serve(*, file: str, env: str | None, include: tuple[str, ...]) -> None:
    """Serve the functions of a file while you edit it, until Ctrl-C.

    The command deploys all functions of the file to a development environment, and again after each save of the file or
    of a module that it imports. Running calls finish on the version that they started on. A version with an error is
    reported and not served. The functions' output is shown with their names. At the end the functions are deleted.
    Schedules do not run. The platform on this machine is started if no gateway responds and GPUFN_URL is not set.
    """
    from gpufn.deploy import bundle  # noqa: PLC0415

    home = Home(env or development_environment(getpass.getuser()))
    with as_usage_error("--env"):
        check_group("environment", home.env)
    with as_usage_error():
        bundle.check_file(Path(file))
    reload.prepare()
    _ensure_platform()
    with connect() as client, temporary(client) as functions:
        client.functions()  # a key that cannot deploy anything fails here
        say(f"serving {file} in {home.env}; callers set GPUFN_ENV={home.env}. Ctrl-C ends it", err=True)
        _Serving(client, functions, reload.Request(file, list(include), home, functions.lease)).run()


def _ensure_platform() -> None:
    """Start the platform on this machine, unless a gateway responds or is expected somewhere else."""
    with connect() as client:
        if client.is_alive():
            return
        if os.environ.get("GPUFN_URL") or importlib.util.find_spec("gpufn_local") is None:
            raise GatewayUnavailable(f"no gateway responds at {client.url}: is `gpufn up` running?")
    say("starting the platform on this machine; `gpufn down` stops it", err=True)
    command = [sys.executable, "-m", "gpufn", "up", "--detach"]
    if subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, check=False).returncode:  # noqa: S603
        raise GatewayUnavailable("the platform on this machine does not start")


class _Serving:
    def __init__(self, client: Client, functions: Temporary, request: reload.Request) -> None:
        self._client = client
        self._functions = functions
        self._request = request
        self._file = Path(request.file)
        self._watch = Watch([self._file.resolve()])
        self._reload: Reload | None = None
        self._is_changed = True  # the first reload is due
        self._changed_at = time.monotonic()
        self._retry_at: float | None = None
        self._followers: dict[str, LogFollower] = {}
        self._serving: dict[str, int] = {}  # revision by function
        self._declared: set[str] = set()  # by the last version that could be read

    def run(self) -> None:
        """Reload after each change. Raises Conflict when another client takes the functions over."""
        try:
            while True:
                self._look_for_changes()
                if self._is_changed and (self._reload is None or not self._reload.is_deploying):
                    self._start()
                self._handle_events()
                if self._functions.lost:
                    raise Conflict(self._functions.lost)
        finally:
            if self._reload is not None:
                self._reload.finish_deploy()
                self._reload.stop()
            for follower in self._followers.values():
                follower.stop()

    def _look_for_changes(self) -> None:
        if self._watch.has_changed():
            self._changed_at, self._is_changed = time.monotonic(), True
            self._watch.settle()
        elif self._functions.gone or (self._retry_at is not None and time.monotonic() >= self._retry_at):
            self._functions.gone.clear()
            self._changed_at, self._is_changed = time.monotonic(), True

    def _start(self) -> None:
        if self._reload is not None:
            self._reload.stop()
        self._is_changed, self._retry_at = False, None
        self._reload = Reload(self._request)

    def _handle_events(self) -> None:
        if (current := self._reload) is None:
            time.sleep(_POLL_S)
            return
        for event in current.events(_POLL_S):
            self._handle(event, current)
            if event.kind == "ended":
                current.stop()
                self._reload = None

    def _handle(self, event: Event, current: Reload) -> None:
        match event.kind:
            case "read":
                for name in event.functions:
                    self._functions.add(name)
                self._watch_files(event, current)
                self._declared = set(event.functions)
            case "ended":
                self._remove_others()
            case "deployed" if event.function:
                if event.function not in self._followers:
                    self._followers[event.function] = LogFollower(event.function, event.revision, _show)
            case "served":
                self._functions.on_deployed(event.function)  # not earlier: its models may have been built until now
                if not event.is_new:
                    return
                took = duration(time.monotonic() - self._changed_at)
                self._serving[event.function] = event.revision
                address = f"{self._client.url}{event.path or f'/v1/functions/{event.function}/invoke'}"
                say(f"{event.function}@{event.revision}  {address}  {took}")
            case "failed":
                self._watch_files(event, current)
                if event.code == GatewayUnavailable.code:
                    self._retry_at = time.monotonic() + _RETRY_S
                if event.code == Forbidden.code and not self._serving:
                    raise Forbidden(event.text)
                served = self._serving if not event.function else {event.function: self._serving.get(event.function)}
                still = ", ".join(f"{name}@{number}" for name, number in served.items() if number)
                say(f"gpufn: {as_line(event.text)}" + (f"\ngpufn: still serving {still}" if still else ""), err=True)

    def _watch_files(self, event: Event, current: Reload) -> None:
        if self._watch.add(map(Path, event.files), current.started_ns):
            self._is_changed = True

    def _remove_others(self) -> None:
        for name in set(self._functions.names) - self._declared:
            self._functions.remove(name)
            self._serving.pop(name, None)
            if follower := self._followers.pop(name, None):
                follower.stop()
            say(f"deleted {name}, which {self._file} no longer has", err=True)


def _show(line: LogLine) -> None:
    mark = "! " if line.stream == "error" else ""
    say(f"{parts_of(line.function).base} | {mark}{line.text.rstrip()}")
