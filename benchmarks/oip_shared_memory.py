"""Shared memory of the Open Inference Protocol against tensors in the request, on a running platform of this machine.

    export GPUFN_SHARED_MEMORY_PREFIX=bench-; gpufn up --detach
    GPUFN_URL=http://127.0.0.1:8090 python benchmarks/oip_shared_memory.py [--mib 10] [--calls 20] [--turns 7]

Deploys a model that returns its input, and calls it through Triton's clients in turns. A call begins with an array and
ends with one. Prints medians of the time of a call, and of the CPU time of client and gateway.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import numpy as np
import onnx
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
from onnx import TensorProto, helper
from tritonclient.utils import shared_memory

from gpufn_core.home import Home

MODEL = "bench-identity"
PREFIX = os.environ.get("GPUFN_SHARED_MEMORY_PREFIX", "bench-")


class Turn(NamedTuple):
    ms: float
    client_ms: float
    gateway_ms: float


def write_model(file: Path) -> None:
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", 1024]) for name in "xy")
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], MODEL, [x], [y])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
    model.ir_version = 8
    onnx.save(model, file)


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def in_the_request(client: Any, library: Any, array: Any) -> Callable[[], Any]:
    def call() -> Any:
        tensor = library.InferInput("x", array.shape, "FP32")
        tensor.set_data_from_numpy(array)
        return client.infer(MODEL, [tensor], outputs=[library.InferRequestedOutput("y")]).as_numpy("y")

    return call


@contextlib.contextmanager
def in_shared_memory(client: Any, library: Any, array: Any, name: str) -> Iterator[Callable[[], Any]]:
    key, size = f"{PREFIX}{os.getpid()}-{name}", array.nbytes
    handle = shared_memory.create_shared_memory_region(name, key, 2 * size)
    client.register_system_shared_memory(name, key, 2 * size)

    def call() -> Any:
        shared_memory.set_shared_memory_region(handle, [array])
        tensor, wanted = library.InferInput("x", array.shape, "FP32"), library.InferRequestedOutput("y")
        tensor.set_shared_memory(name, size)
        wanted.set_shared_memory(name, size, offset=size)
        client.infer(MODEL, [tensor], outputs=[wanted])
        return shared_memory.get_contents_as_numpy(handle, np.float32, array.shape, size)

    try:
        yield call
    finally:
        client.unregister_system_shared_memory(name)
        shared_memory.destroy_shared_memory_region(handle)


def turn(call: Callable[[], Any], gateway: int, calls: int) -> Turn:
    call()
    cpu_before, own_before, before = cpu_s(gateway), time.process_time(), time.perf_counter()
    for _ in range(calls):
        call()
    took_s, own_s = time.perf_counter() - before, time.process_time() - own_before
    return Turn(*(value / calls * 1e3 for value in (took_s, own_s, cpu_s(gateway) - cpu_before)))


def measure(address: str, gateway: int, array: Any, options: argparse.Namespace) -> None:
    with contextlib.ExitStack() as stack:
        http = stack.enter_context(contextlib.closing(triton_http.InferenceServerClient(address)))
        grpc = stack.enter_context(contextlib.closing(triton_grpc.InferenceServerClient(address)))
        ways = {
            "binary HTTP": in_the_request(http, triton_http, array),
            "shared memory, HTTP": stack.enter_context(in_shared_memory(http, triton_http, array, "http")),
            "gRPC": in_the_request(grpc, triton_grpc, array),
            "shared memory, gRPC": stack.enter_context(in_shared_memory(grpc, triton_grpc, array, "grpc")),
        }
        for name, call in ways.items():
            np.testing.assert_array_equal(call(), array, name)
        got: dict[str, list[Turn]] = {name: [] for name in ways}
        for _ in range(options.turns):
            for name, call in ways.items():
                got[name].append(turn(call, gateway, options.calls))
        for name, turns in got.items():
            ms, client_ms, gateway_ms = (statistics.median(column) for column in zip(*turns, strict=True))
            pairs = zip(turns, got["binary HTTP"], strict=True)
            ratio = statistics.median(one.ms / other.ms for one, other in pairs)
            print(
                f"{name:20} {ms:6.1f} ms, {client_ms:5.1f} ms of client CPU, {gateway_ms:5.1f} ms of gateway CPU, "
                f"{ratio:.2f} of binary HTTP"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=float, default=10)
    parser.add_argument("--calls", type=int, default=20)
    parser.add_argument("--turns", type=int, default=7)
    options = parser.parse_args()
    gateway = json.loads(Home.from_env().up_file.read_text())["pids"]["gateway"]
    rows = max(1, round(options.mib * (1 << 20) / 4096))
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "model.onnx")
        write_model(file)
        command = [
            sys.executable,
            "-m",
            "gpufn",
            "deploy",
            str(file),
            "--name",
            MODEL,
            "--max-batch",
            str(rows),
            "--replace",
        ]
        subprocess.run(command, check=True)
    array = np.random.default_rng(1).random((rows, 1024), np.float32)
    measure(urlsplit(os.environ["GPUFN_URL"]).netloc, gateway, array, options)


if __name__ == "__main__":
    main()
