"""The Open Inference Protocol over gRPC against HTTP, on a running platform of this machine.

    GPUFN_URL=http://127.0.0.1:8090 python benchmarks/oip_over_grpc.py [--calls 3000] [--turns 5]

Deploys the smallest model, and calls it through both of Triton's asyncio clients in turns. Prints calls per second, and
the CPU time of the gateway per call.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import numpy as np
import onnx
import tritonclient.grpc.aio as triton_grpc
import tritonclient.http.aio as triton_http
from onnx import TensorProto, helper

from gpufn_core.home import Home

MODEL = "bench-oip"


class Turn(NamedTuple):
    calls_per_s: float
    gateway_us: float


def write_model(file: Path) -> None:
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", 4]) for name in "xy")
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], MODEL, [x], [y])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
    model.ir_version = 8
    onnx.save(model, file)


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def turn(client: Any, module: Any, gateway: int, calls: int, at_once: int) -> Turn:
    tensor = module.InferInput("x", [1, 4], "FP32")
    tensor.set_data_from_numpy(np.ones((1, 4), np.float32))

    async def worker() -> None:
        for _ in range(calls // at_once):
            await client.infer(MODEL, [tensor])

    await client.infer(MODEL, [tensor])
    cpu_before, before = cpu_s(gateway), time.perf_counter()
    await asyncio.gather(*(worker() for _ in range(at_once)))
    took_s = time.perf_counter() - before
    return Turn(calls / took_s, (cpu_s(gateway) - cpu_before) / calls * 1e6)


async def measure(address: str, gateway: int, calls: int, turns: int) -> None:
    async with (
        triton_grpc.InferenceServerClient(address) as over_grpc,
        triton_http.InferenceServerClient(address, conn_limit=64) as over_http,
    ):
        for at_once in (1, 32):
            got: list[tuple[Turn, Turn]] = []
            for _ in range(turns):
                one = await turn(over_grpc, triton_grpc, gateway, calls, at_once)
                got.append((one, await turn(over_http, triton_http, gateway, calls, at_once)))
            for name, column in zip(("gRPC", "HTTP"), zip(*got, strict=True), strict=True):
                rate = statistics.median(each.calls_per_s for each in column)
                cpu = statistics.median(each.gateway_us for each in column)
                print(f"{at_once:3} at once, {name}: {rate:6.0f} calls/s, {cpu:4.0f} µs of gateway CPU per call")
            ratio = statistics.median(a.calls_per_s / b.calls_per_s for a, b in got)
            print(f"{at_once:3} at once, gRPC / HTTP: {ratio:.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=3000)
    parser.add_argument("--turns", type=int, default=5)
    options = parser.parse_args()
    gateway = json.loads(Home.from_env().up_file.read_text())["pids"]["gateway"]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "model.onnx")
        write_model(file)
        subprocess.run([sys.executable, "-m", "gpufn", "deploy", str(file), "--name", MODEL, "--replace"], check=True)
    asyncio.run(measure(urlsplit(os.environ["GPUFN_URL"]).netloc, gateway, options.calls, options.turns))


if __name__ == "__main__":
    main()
