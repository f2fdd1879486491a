"""A tiny runner: it listens on a unix socket and exchanges frames with a real worker process."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gpufn_core.domain.invocation import OutcomeKind
from gpufn_core.errors import ErrorInfo
from gpufn_core.protocol import frames
from gpufn_core.protocol.frames import (
    FrameReader,
    Freed,
    Hello,
    Item,
    Log,
    Ready,
    Result,
    Run,
    StartFailed,
    WorkerFrame,
)
from gpufn_core.protocol.launch import EXIT_GPU_FAULT, EXIT_START_FAILED, WorkerConfig
from gpufn_core.spec.function_spec import Batch, CallKind, EntryPoint, FunctionSpec, MethodSpec, Packaging
from gpufn_core.spec.model_spec import ModelFile, ModelSpec
from gpufn_core.spec.resources import Resources
from gpufn_core.spec.tensor_signature import DATATYPE
from tests.forked_commands import Fork, ForkedCommands

PATIENCE_S = 20.0
_workers = ForkedCommands("tests.runtime.worker.forked_workers")
JSON = "application/json"


class Peer:
    """A worker from its runner's view."""

    def __init__(self, folder: Path, config: WorkerConfig) -> None:
        self.config = config
        self.config_path = folder / "config.json"
        self.config_path.write_bytes(msgspec.json.encode(config))
        self.process: subprocess.Popen[bytes] | Fork | None = None
        self.output = folder / "output"
        self.logs: list[tuple[int, str, str]] = []
        self.freed = 0
        self._server: socket.socket | None = None
        self._link: socket.socket | None = None
        self._last_attempt = 0
        self.listen()

    def listen(self) -> None:
        Path(self.config.socket).unlink(missing_ok=True)
        self._server = socket.socket(socket.AF_UNIX)
        self._server.bind(self.config.socket)
        self._server.listen()
        self._server.settimeout(PATIENCE_S)

    def launch(self, *, as_fork: bool = True) -> Peer:
        """Start the process: as a fork, or with a new interpreter."""
        with self.output.open("wb") as output:
            if as_fork:
                arguments = [self.config_path]
                self.process = _workers.start(arguments, os.environ, output, output, start_new_session=True)
            else:
                self.process = subprocess.Popen(
                    [sys.executable, "-m", "gpufn_runtime.worker", str(self.config_path)],
                    stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True,
                )  # fmt: skip
        return self

    def accept(self) -> Hello:
        assert self._server is not None
        self._link, _ = self._server.accept()
        self._link.settimeout(PATIENCE_S)
        self._reader: FrameReader[WorkerFrame] = FrameReader(WorkerFrame)
        self._arrived: list[tuple[WorkerFrame, bytes]] = []
        hello, _ = self.next()
        assert isinstance(hello, Hello)
        return hello

    def ready(self) -> Ready:
        self.accept()
        frame, _ = self.next()
        assert isinstance(frame, Ready), frame
        return frame

    def start_failure(self) -> StartFailed:
        self.accept()
        frame, _ = self.next()
        assert isinstance(frame, StartFailed), frame
        self.hang_up()
        assert self.wait() in (EXIT_START_FAILED, EXIT_GPU_FAULT)
        return frame

    def next(self) -> tuple[WorkerFrame, bytes]:
        """Return the next frame other than Log (see `logs`) and Freed (see `freed`). EOFError when the worker
        disconnects."""
        while True:
            while not self._arrived:
                assert self._link is not None
                try:
                    data = self._link.recv(1 << 16)
                except ConnectionResetError:
                    data = b""
                if not data:
                    raise EOFError
                self._arrived += self._reader.feed(data)
            frame, body = self._arrived.pop(0)
            if isinstance(frame, Log):
                self.logs.append((frame.attempt, frame.stream, body.decode()))
            elif isinstance(frame, Freed):
                self.freed += 1
            else:
                return frame, body

    def send(self, frame: msgspec.Struct, body: bytes = b"") -> None:
        self.send_bytes(frames.encode(frame, body))

    def send_bytes(self, data: bytes) -> None:
        assert self._link is not None
        self._link.sendall(data)

    def run(self, body: bytes = b"{}", **fields: Any) -> int:
        """Send a Run; returns its number."""
        self._last_attempt += 1
        run = {"method": "", "content_type": JSON, "accept": JSON, **fields}
        self.send(Run(self._last_attempt, f"i{self._last_attempt}", **run), body)
        return self._last_attempt

    def run_at_once(self, *bodies: bytes) -> list[int]:
        """Send a Run for each of `bodies` in one write; returns their numbers."""
        first = self._last_attempt + 1
        self._last_attempt += len(bodies)
        runs = [
            frames.encode(Run(number, f"i{number}", method="", content_type=JSON, accept=JSON), body)
            for number, body in enumerate(bodies, first)
        ]
        self.send_bytes(b"".join(runs))
        return list(range(first, self._last_attempt + 1))

    def result(self) -> tuple[Result, bytes]:
        frame, body = self.next()
        assert isinstance(frame, Result), frame
        return frame, body

    def item(self) -> bytes:
        frame, body = self.next()
        assert isinstance(frame, Item), frame
        return body

    def call(self, body: bytes = b"{}", **fields: Any) -> bytes:
        """Run and wait; returns the result's body."""
        number = self.run(body, **fields)
        result, answer = self.result()
        assert result.error is None, result.error.traceback
        assert (result.attempt, result.kind.value) == (number, "succeeded")
        return answer

    def failure(self, body: bytes = b"{}", **fields: Any) -> tuple[str, ErrorInfo]:
        """Run and wait; returns the error."""
        self.run(body, **fields)
        result, _ = self.result()
        assert result.error is not None, result
        return result.kind.value, result.error

    def answer(
        self,
        call: int,
        content_type: str,
        body: bytes,
        kind: OutcomeKind = OutcomeKind.SUCCEEDED,
        error: ErrorInfo | None = None,
    ) -> None:
        self.send(frames.Answer(call, kind, error, content_type), body)

    def answer_item(self, call: int, body: bytes) -> None:
        self.send(frames.AnswerItem(call, JSON), body)

    def hang_up(self) -> None:
        for end in (self._server, self._link):  # in this order, because the worker reconnects at once
            if end is not None:
                end.close()

    def wait(self) -> int:
        assert self.process is not None
        return self.process.wait(PATIENCE_S)

    def printed(self) -> str:
        return self.output.read_text()

    def close(self) -> None:
        self.hang_up()
        if self.process is not None:
            self.process.kill()
            self.process.wait()


MakePeer = Callable[..., Peer]


@pytest.fixture(scope="session", autouse=True)
def _end_of_forks() -> Iterator[None]:
    yield
    _workers.stop()


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A short path, because a unix socket's path has at most 108 bytes."""
    return tmp_path_factory.mktemp("w")


@pytest.fixture
def make_peer(folder: Path) -> Iterator[MakePeer]:
    """A worker that is configured and not started: `make_peer(source, qualname="f", kind=..., batch=...)`.

    `models` are the parameters that get a model; without source the function is its one model.
    """
    peers: list[Peer] = []

    def make(
        source: str = "",
        qualname: str = "f",
        *,
        kind: str = "sync",
        methods: dict[str, str] | None = None,
        files: dict[str, str | bytes] | None = None,
        pickled: bytes | None = None,
        models: tuple[str, ...] = (),
        raw: str | None = None,
        tensors: dict[str, str] | None = None,  # parameters that are arrays, with their datatypes
        batch: Batch | None = None,
        batches: dict[str, Batch] | None = None,
        concurrency: int = 1,
        cpu: float = 1.0,
        gpu: tuple[str, ...] = (),
        pickle: bool = False,
        startup_timeout_s: float = 600.0,
        worker: str = "w-1",
        **config: Any,
    ) -> Peer:
        place = folder / str(len(peers))
        bundle = place / "bundle"
        bundle.mkdir(parents=True)
        (bundle / "app.py").write_text(textwrap.dedent(source))
        for name, content in (files or {}).items():
            (bundle / name).parent.mkdir(parents=True, exist_ok=True)
            (bundle / name).write_bytes(content if isinstance(content, bytes) else textwrap.dedent(content).encode())
        if pickled is not None:
            (bundle / "function.pkl").write_bytes(pickled)
        packaging = Packaging.SOURCE if pickled is None else Packaging.PICKLE
        if models and not source:
            packaging = Packaging.MODEL
        names = methods if methods is not None else {"": kind}
        spec = FunctionSpec(
            name="f",
            entry=EntryPoint("app", qualname, packaging),
            methods=tuple(
                MethodSpec(
                    name,
                    CallKind(kind),
                    parameters={"properties": {each: {DATATYPE: kind} for each, kind in (tensors or {}).items()}},
                    raw_parameter=raw,
                    batch=(batches or {}).get(name, msgspec.UNSET),
                )
                for name, kind in names.items()
            ),
            is_class=methods is not None,
            models=tuple(ModelSpec(parameter=name, files=(ModelFile("m.onnx", "0" * 64, 1),)) for name in models),
            concurrency=concurrency,
            batch=batch,
            resources=Resources(cpu=cpu, gpu=gpu),
            env={"FROM_SPEC": "yes"},
            pickle=pickle,
            startup_timeout_s=startup_timeout_s,
        )
        peer = Peer(
            place,
            WorkerConfig(
                worker=worker, function="f", revision=1, spec=spec, bundle_dir=str(bundle),
                socket=str(place / "s"), launched_at=time.time(), **config,
            ),
        )  # fmt: skip
        peers.append(peer)
        return peer

    yield make
    for peer in peers:
        peer.close()


@pytest.fixture
def start(make_peer: MakePeer) -> MakePeer:
    """Like `make_peer`, but started and Ready."""

    def started(*args: Any, as_fork: bool = True, **options: Any) -> Peer:
        peer = make_peer(*args, **options).launch(as_fork=as_fork)
        peer.ready()
        return peer

    return started


@pytest.fixture(autouse=True)
def _our_packages_on_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    root = Path(__file__).parents[3]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(str(root / name) for name in ("sdk", "runtime")))
