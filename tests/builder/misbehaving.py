"""A candidate process that misbehaves as the request's flags say, instead of compiling."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from pathlib import Path

import msgspec

from gpufn_builder.checks.inaccurate_output import InaccurateOutput
from gpufn_builder.processes.process import ReportProgress, serve
from gpufn_builder.processes.process_messages import CandidateRequest, CandidateResult
from gpufn_core.domain.devices.engine import Accuracy, BuildStage, Latency
from gpufn_core.errors import BuildFailed, BusUnavailable

RESULT = CandidateResult(
    files=("model.onnx", "golden.npz"),
    settings={"intra_op_threads": 1},
    why_alone="",
    accuracy=Accuracy(float("inf"), 0.0, 1.0),
    outputs=(),
    latency=Latency(0.1, 0.2, 0.3, 10.0, True),
    quantiles_s=(),
    gpu_nodes=0,
    cpu_nodes=1,
    nodes={},
    notes=(),
    seconds={},
)


def work(request: CandidateRequest, tell: ReportProgress) -> msgspec.Struct:
    tell(BuildStage.COMPILE, 0.25, "a detail")
    match request.identity.flags["do"]:
        case "end well":
            return RESULT
        case "be inaccurate":
            raise InaccurateOutput("too far", case="sample 3", stage="verify", node="y")
        case "print and wait":
            print("a line", flush=True)
            while not Path(request.folder).exists():
                time.sleep(0.01)
            return RESULT
        case "refuse":
            raise BuildFailed("the shape is wrong", stage="compile", node="conv1")
        case "raise":
            print("output before the crash")
            raise ValueError("not so")
        case "crash" | "crash while measuring" | "leave" | "leave without a word" as do:
            _end(do, tell)
        case "fill the disk":
            Path(request.folder).write_bytes(bytes(2 << 20))
        case "eat memory":
            bytearray(8 << 30)
        case "hang":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            Path(request.folder).write_text(str(os.getpid()))
            while True:
                time.sleep(60)
        case do:
            _deceive(do, tell)
    raise AssertionError


def _end(do: str, tell: ReportProgress) -> None:
    if do == "crash while measuring":
        tell(BuildStage.MEASURE, 0.8, "")
    if do == "leave":
        print("left", file=sys.stderr, flush=True)
        os._exit(7)
    if do == "leave without a word":
        os._exit(0)
    ctypes.string_at(0)


def _deceive(do: str, tell: ReportProgress) -> None:
    """Behave like a process that a hostile model has taken over."""
    match do:
        case "be killed":
            os.kill(os.getpid(), signal.SIGKILL)
        case "say nonsense":
            os.write(int(sys.argv[2]), b'{"\xff": 1}\n')
            time.sleep(60)
        case "say the same for ever":
            while True:
                os.write(int(sys.argv[2]), b"x" * 4096)
        case "leave nonsense":
            _result().write_bytes(b"what is this?")
            os._exit(0)
        case "leave a pipe":
            os.mkfifo(_result())
            os._exit(0)
        case "leave a link":
            (_result().parent / "elsewhere").write_bytes(msgspec.msgpack.encode(RESULT))
            _result().symlink_to("elsewhere")
            os._exit(0)
        case "leave too much":
            with _result().open("wb") as file:
                file.truncate(1 << 30)
            os._exit(0)
        case "leave somebody behind":
            if os.fork():
                os._exit(0)
            while True:  # until the pipe is closed
                tell(BuildStage.COMPILE, 0.5, "still here")
        case _:
            _go_on(do)


def _go_on(do: str) -> None:
    match do:
        case "print for ever":
            while True:
                print("a line", flush=True)
                time.sleep(0.01)
        case "fail as the bus does":
            raise BusUnavailable("not so")
        case "store without end":
            while True:
                _result().with_name(str(time.monotonic())).write_bytes(bytes(1 << 20))
                time.sleep(0.01)
        case "eat memory in many processes":
            children = [os.fork() for _ in range(2)]
            kept = b"x" * (150 << 20)
            signal.pause()
            del kept, children
        case "print without end":
            _print_until_it_is_shortened()
            raise ValueError("the last words")


def _result() -> Path:
    return Path(sys.argv[1]).parent / "result"


def _print_until_it_is_shortened() -> None:
    size = 0
    while os.fstat(1).st_size >= size:
        if size > 64 << 20:
            os._exit(3)
        size = os.fstat(1).st_size
        os.write(1, b"x" * 4095 + b"\n")
        time.sleep(0.001)


if __name__ == "__main__":
    sys.exit(serve(CandidateRequest, work))
