"""One reload of `gpufn serve`, in a process of its own: read the file, deploy its functions, wait until they serve.

A new process imports the file and its modules from the start, as a deploy does. It is forked from a server process that
has imported gpufn already, and reports its progress as events, in JSON.
"""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import os
import signal
import time
import zipfile
from collections.abc import Iterable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

import msgspec

from gpufn_core.domain.revision import Lease
from gpufn_core.spec.naming.names import Home

if TYPE_CHECKING:
    from gpufn.deploy.deployables import Deployable

_PRELOADED: Final = [
    "gpufn.cli.develop.reload",
    "gpufn.cli.develop.temporary",
    "gpufn.cli.functions.deploy",
    "gpufn.client.client",
    "gpufn.deploy.deployables",
    "gpufn.deploy.deployment",
    "gpufn.deploy.bundle",
    "gpufn.deploy.code_digest",
    "gpufn.deploy.deploy_source",
    "gpufn.deploy.model_files",
    "gpufn.deploy.weights.files",
    "gpufn.declare.function",
    "httpx",
]
_DEPLOY_S: Final = 5.0
_contexts = multiprocessing.get_context("forkserver")


class Event(msgspec.Struct, omit_defaults=True):
    """Progress of a reload. `read`: the file was read; it has these functions and files. `deployed`, `served` and
    `failed` are of one function, or `failed` of the whole file; `code` is the code of a deploy's error. `ended` is the
    last event. `path` is where a served function takes calls, or the
    first method of a class."""

    kind: Literal["read", "deployed", "served", "failed", "ended"]
    function: str = ""
    revision: int = 0
    is_new: bool = False
    code: str = ""
    text: str = ""
    functions: list[str] = []
    files: list[str] = []
    path: str = ""


class Request(msgspec.Struct):
    file: str
    include: list[str]
    home: Home
    lease: Lease


class Reload:
    """A running reload. It can be stopped at any time, except while it deploys."""

    def __init__(self, request: Request) -> None:
        self.started_ns = time.time_ns()
        self.is_deploying = False
        self.connection, theirs = _contexts.Pipe(duplex=False)
        self._process = _contexts.Process(target=_run, args=(theirs, msgspec.json.encode(request)))
        self._process.start()
        theirs.close()

    def events(self, timeout_s: float) -> Iterator[Event]:
        """Yield the events that arrive within `timeout_s`. The last one is `ended`, also if the process died."""
        while self.connection.poll(timeout_s):
            timeout_s = 0
            try:
                event = msgspec.json.decode(self.connection.recv_bytes(), type=Event)
            except (EOFError, OSError):
                yield Event("failed", text="the process that reads the file died")
                event = Event("ended")
            self.is_deploying = event.kind in ("read", "deployed") and event.text != "all"
            yield event
            if event.kind == "ended":
                return

    def finish_deploy(self) -> None:
        """Wait until no function is being deployed: one that is created later would stay until its lease expires."""
        give_up = time.monotonic() + _DEPLOY_S
        while self.is_deploying and time.monotonic() < give_up:
            for _ in self.events(0.1):
                pass

    def stop(self) -> None:
        self._process.kill()
        self._process.join()
        self.connection.close()


def prepare() -> None:
    """Start the server process that reloads are forked from."""
    _contexts.set_forkserver_preload(_PRELOADED)


def _run(connection: Connection, encoded: bytes) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal sends it to us too; the parent stops us
    os.environ["TERM"] = "dumb"  # a spinner would overwrite lines that the parent prints

    def send(event: Event) -> None:
        with contextlib.suppress(OSError):
            connection.send_bytes(msgspec.json.encode(event))

    try:
        for event in _events(msgspec.json.decode(encoded, type=Request)):
            send(event)
    finally:
        send(Event("ended"))


def _events(request: Request) -> Iterator[Event]:
    from gpufn.cli.develop.temporary import development_version  # noqa: PLC0415
    from gpufn.cli.functions.deploy import call_paths, read_functions, wait_until_served  # noqa: PLC0415
    from gpufn.cli.terminal.command import connect  # noqa: PLC0415
    from gpufn.deploy import deployment as _deployment  # noqa: PLC0415
    from gpufn.deploy.signing_key import read_signer  # noqa: PLC0415
    from gpufn_core.errors import GpufnError  # noqa: PLC0415
    from gpufn_core.ids import new_ulid  # noqa: PLC0415

    file = Path(request.file)
    try:
        signer = read_signer(None)
        deployables = [
            development_version(each) for each in read_functions(request.file, [], request.include, request.home)
        ]
    except (GpufnError, OSError) as error:
        yield Event("failed", text=str(error), files=_imported_files(file))
        return
    specs = {each.spec.name: each.spec for each in deployables}
    yield Event("read", functions=list(specs), files=_files_of(deployables, file))
    deployments = []
    with connect() as client:
        deploy_id = new_ulid()
        for each in deployables:
            try:
                deployment = _deployment.deploy(client, each, deploy_id=deploy_id, lease=request.lease, signer=signer)
            except GpufnError as error:
                yield Event("failed", each.spec.name, code=error.code, text=str(error))
                continue
            deployments.append(deployment)
            yield Event("deployed", deployment.function, deployment.revision, deployment.is_new)
        yield Event("deployed", text="all")
        for deployment in deployments:
            try:
                view = wait_until_served(client, deployment, None)
            except (GpufnError, TimeoutError) as error:
                yield Event("failed", deployment.function, deployment.revision, text=str(error))
                continue
            path = next(call_paths(specs[deployment.function]), "")
            yield Event("served", view.name, view.active, deployment.is_new, path=path)


def _files_of(deployables: Iterable[Deployable], file: Path) -> list[str]:
    """Return the project's files that the deploy has read."""
    from gpufn.deploy.imports.import_collector import import_root  # noqa: PLC0415

    roots = [import_root(file.resolve()), Path.cwd()]
    paths = {file.resolve()}
    for data in {each.data for each in deployables}:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            names = archive.namelist()
        paths |= {next((root / name for root in roots if (root / name).is_file()), file.resolve()) for name in names}
    paths |= {path for each in deployables for path in each.paths.values()}
    return sorted(map(os.fspath, paths))


def _imported_files(file: Path) -> list[str]:
    """Return the project's files that a file imports, found without running it."""
    from gpufn.deploy.imports.import_collector import Collector, import_name  # noqa: PLC0415
    from gpufn_core.errors import GpufnError  # noqa: PLC0415

    try:
        root, module = import_name(file.resolve())
        files = Collector([root, Path.cwd()])
        files.add(module)
    except (GpufnError, OSError):
        return []
    return [os.fspath(path) for name in files.files for path in (root / name, Path.cwd() / name) if path.is_file()]
