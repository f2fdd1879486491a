"""The Open Inference Protocol over gRPC against HTTP, and against PyTriton, on a running platform of this machine.

    GPUFN_URL=http://127.0.0.1:8090 python benchmarks/oip_over_grpc.py [--calls 3000] [--turns 5]

Deploys the smallest model, and calls it through both of Triton's asyncio clients in turns. With PyTriton in the
environment BENCH_PEERS, the same for PyTriton with the same file. Prints calls per second, and the CPU time of gpufn's
gateway per call.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import numpy as np
import onnx
import tritonclient.grpc.aio as triton_grpc
import tritonclient.http.aio as triton_http
from onnx import TensorProto, helper

import measure
from gpufn_core.home import Home

MODEL = "bench-oip"
MAX_BATCH = 8


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
    if not pid:
        return 0.0
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class Way(NamedTuple):
    """A client and its server; `gateway` is the process whose CPU time counts, or 0."""

    name: str
    client: Any
    module: Any
    model: str
    gateway: int


async def turn(way: Way, calls: int, at_once: int) -> Turn:
    client, module = way.client, way.module
    tensor = module.InferInput("x", [1, 4], "FP32")
    tensor.set_data_from_numpy(np.ones((1, 4), np.float32))

    async def worker() -> None:
        for _ in range(calls // at_once):
            await client.infer(way.model, [tensor])

    await client.infer(way.model, [tensor])
    cpu_before, before = cpu_s(way.gateway), time.perf_counter()
    await asyncio.gather(*(worker() for _ in range(at_once)))
    took_s = time.perf_counter() - before
    return Turn(calls / took_s, (cpu_s(way.gateway) - cpu_before) / calls * 1e6)


async def compare(address: str, peer: tuple[str, str] | None, gateway: int, calls: int, turns: int) -> None:
    async with contextlib.AsyncExitStack() as stack:

        async def way(name: str, address: str, module: Any, model: str, gateway: int) -> Way:
            options = {"conn_limit": 64} if module is triton_http else {}
            client = await stack.enter_async_context(module.InferenceServerClient(address, **options))
            return Way(name, client, module, model, gateway)

        ways = [
            await way("gRPC", address, triton_grpc, MODEL, gateway),
            await way("HTTP", address, triton_http, MODEL, gateway),
        ]
        if peer is not None:
            ways.append(await way("PyTriton gRPC", peer[1], triton_grpc, "model", 0))
            ways.append(await way("PyTriton HTTP", peer[0], triton_http, "model", 0))
        for at_once in (1, 32):
            got: dict[str, list[Turn]] = {each.name: [] for each in ways}
            for _ in range(turns):
                for each in ways:
                    got[each.name].append(await turn(each, calls, at_once))
            for each in ways:
                rate = statistics.median(one.calls_per_s for one in got[each.name])
                cpu = statistics.median(one.gateway_us for one in got[each.name])
                note = f", {cpu:4.0f} µs of gateway CPU per call" if each.gateway else ""
                print(f"{at_once:3} at once, {each.name}: {rate:6.0f} calls/s{note}")
            for other in ways[1:]:
                pairs = zip(got["gRPC"], got[other.name], strict=True)
                ratio = statistics.median(one.calls_per_s / two.calls_per_s for one, two in pairs)
                print(f"{at_once:3} at once, gRPC / {other.name}: {ratio:.2f}")


@contextlib.contextmanager
def pytriton(model: Path) -> Iterator[tuple[str, str] | None]:
    """Run PyTriton with the model, and yield its addresses for HTTP and gRPC; None if it is not installed."""
    python = measure.peers_python()
    if not measure.has(python, "pytriton"):
        print("skipped PyTriton: not installed", file=sys.stderr)
        yield None
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    row = {"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [1, 1, 1, 1]}
    post = measure.Post(
        "/v2/models/model/infer", json.dumps({"inputs": [row]}).encode(), {"Content-Type": "application/json"}
    )
    environ = {"MODEL": str(model), "MAX_BATCH": str(MAX_BATCH), "THREADS": "1", "SESSION": "{}"}
    with measure.peer("pytriton_model", python, post, GRPC_PORT=str(port), **environ) as server:
        yield urlsplit(server.url).netloc, f"127.0.0.1:{port}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=3000)
    parser.add_argument("--turns", type=int, default=5)
    options = parser.parse_args()
    gateway = json.loads(Home.from_env().up_file.read_text())["pids"]["gateway"]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "model.onnx")
        write_model(file)
        command = [sys.executable, "-m", "gpufn", "deploy", str(file), "--name", MODEL, "--replace"]
        subprocess.run([*command, "--max-batch", str(MAX_BATCH)], check=True)
        with pytriton(file) as peer:
            address = urlsplit(os.environ["GPUFN_URL"]).netloc
            asyncio.run(compare(address, peer, gateway, options.calls, options.turns))


if __name__ == "__main__":
    main()
