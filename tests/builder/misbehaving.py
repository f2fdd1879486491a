"""A process that takes a CandidateRequest and does what the request's flags say, in place of compiling."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from pathlib import Path

import msgspec

from gpufn.engine import Accuracy, BuildStage, Latency
from gpufn.errors import BuildFailed
from gpufn_builder.exchange import CandidateRequest, CandidateResult
from gpufn_builder.process import Tell, serve

RESULT = CandidateResult(
    files=("model.onnx", "golden.npz"),
    settings={"intra_op_threads": 1},
    batched=False,
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


def work(request: CandidateRequest, tell: Tell) -> msgspec.Struct:
    tell(BuildStage.COMPILE, 0.25, "as told")
    match request.identity.flags["do"]:
        case "end well":
            return RESULT
        case "refuse":
            raise BuildFailed("the shape is wrong", stage="compile", node="conv1")
        case "raise":
            print("what it said before")
            raise ValueError("not so")
        case "crash":
            ctypes.string_at(0)
        case "leave":
            print("left", file=sys.stderr, flush=True)
            os._exit(7)
        case "leave without a word":
            os._exit(0)
        case "be killed":
            os.kill(os.getpid(), signal.SIGKILL)
        case "crash while measuring":
            tell(BuildStage.MEASURE, 0.8, "")
            ctypes.string_at(0)
        case "fill the disk":
            Path(request.folder).write_bytes(bytes(2 << 20))
        case "eat memory":
            bytearray(8 << 30)
        case "hang":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            Path(request.folder).write_text(str(os.getpid()))
            while True:
                time.sleep(60)
    raise AssertionError


if __name__ == "__main__":
    sys.exit(serve(CandidateRequest, work))
