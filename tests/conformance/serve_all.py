"""One process that loads the engines of many cases and serves each case as a worker does, one after the other.

`python -m tests.conformance.serve_all FOLDER` reads the Outcomes of `build_all` from standard input, one per line of
JSON. It prints each of them, and updates the Outcomes of built engines after loading and calling them.
"""

from __future__ import annotations

import pickle
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import msgspec

from gpufn_core.protocol.launch import WorkerConfig
from gpufn_core.spec.function_spec import EntryPoint, FunctionSpec, MethodSpec, Packaging
from gpufn_core.spec.model_spec import ModelFile, ModelSpec
from gpufn_runtime.worker.engines.load import load_session
from gpufn_runtime.worker.engines.model_function import ModelFunction
from tests.conformance import requests, suite
from tests.conformance.build_all import CASE, Outcome

_PARAMETER = "net"


def serve(case: suite.Case, engine: Path) -> Outcome:
    """Call the engine in binary, in JSON if JSON can represent the case, and twice in one batch."""
    stage = "load"
    try:
        function = ModelFunction(load_session(_config(engine), _PARAMETER), case.name, 1)
        stage = "binary"
        case.check(_answers(case, function, requests.binary(case), 1)[0])
        stage = "JSON"
        request = requests.in_json(case)
        if request is not None and requests.can_be_read_in_json(case):
            case.check(_answers(case, function, request, 1)[0])
        stage = "batch"
        for outputs in _answers(case, function, requests.binary(case), 2):
            case.check(outputs)
    except Exception as error:  # a failed case does not stop the others
        return Outcome(case.name, stage, f"{type(error).__name__}: {error}")
    return Outcome(case.name)


def _answers(case: suite.Case, function: ModelFunction, request: tuple[str, bytes], times: int) -> list[Any]:
    calls = [function.by_name(*request)["calls"] for _ in range(times)]
    answers = function.call_all(calls)
    return [requests.outputs(case, answer.content_type, b"".join(answer.parts)) for answer in answers]


def _config(engine: Path) -> WorkerConfig:
    model = ModelSpec(parameter=_PARAMETER, files=(ModelFile("model.onnx", "0" * 64, 1),))
    spec = FunctionSpec(
        name="f", entry=EntryPoint("", "", Packaging.MODEL), methods=(MethodSpec(),), models=(model,)
    )  # fmt: skip
    return WorkerConfig(
        worker="w", function="f", revision=1, spec=spec, bundle_dir="", socket="", launched_at=time.time(),
        engines={_PARAMETER: (str(engine),)},
    )  # fmt: skip


def main() -> None:
    folder = Path(sys.argv[1])
    for line in sys.stdin.buffer:
        outcome = msgspec.json.decode(line, type=Outcome)
        if not outcome.reason:
            engine = folder / outcome.case
            served = serve(pickle.loads((engine / CASE).read_bytes()), engine)
            outcome = msgspec.structs.replace(served, refusal=outcome.refusal)
            shutil.rmtree(engine)
        print(msgspec.json.encode(outcome).decode(), flush=True)


if __name__ == "__main__":
    main()
