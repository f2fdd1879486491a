"""Model servers with one model each, side by side, and the fastest row encoding of each.

| server | encoding of a row, in and out |
|---|---|
| gpufn, PyTriton | the Open Inference Protocol with binary tensors |
| LitServe, uvicorn | the bytes of the array |
| BentoML | base64 in JSON |

All run the same ONNX file with the number of threads that gpufn's builder chose, and with the spin settings of gpufn's
engines.
"""

from __future__ import annotations

import contextlib
import json
import sys
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
import onnxruntime
from numpy.typing import NDArray

import measure
import networks
from gpufn_core.domain.devices.engine import MANIFEST_FILE, EngineManifest
from gpufn_core.inference.ort_threads import spin_config

_HEAD_LENGTH = "Inference-Header-Content-Length"
_DATATYPES = {"float32": "FP32", "int64": "INT64"}
_PACKAGES = {"litserve": "litserve", "bentoml": "bentoml", "pytriton": "nvidia-pytriton"}
Array = NDArray[Any]


@dataclass(frozen=True)
class Form:
    """`post` builds a request from the input's name and one row; `read` returns the float32 numbers of a response."""

    post: Callable[[str, Array], measure.Post]
    read: Callable[[httpx.Response], Array]


def _tensors(path: str) -> Form:
    def post(name: str, row: Array) -> measure.Post:
        body = row.tobytes()
        tensor = {
            "name": name,
            "datatype": _DATATYPES[row.dtype.name],
            "shape": row.shape,
            "parameters": {"binary_data_size": len(body)},
        }
        head = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
        headers = {"Content-Type": "application/octet-stream", _HEAD_LENGTH: str(len(head))}
        return measure.Post(path, head + body, headers)

    return Form(post, lambda answer: np.frombuffer(answer.content[int(answer.headers[_HEAD_LENGTH]) :], np.float32))


def _bytes(name: str, row: Array) -> measure.Post:
    return measure.Post("/infer", row.tobytes(), {"Content-Type": "application/octet-stream"})


def _base64(name: str, row: Array) -> measure.Post:
    body = json.dumps({"rows": [b64encode(row.tobytes()).decode()]}).encode()
    return measure.Post("/infer", body, {"Content-Type": "application/json"})


_RAW = Form(_bytes, lambda answer: np.frombuffer(answer.content, np.float32))
_PEERS = {
    "uvicorn": _RAW,
    "litserve": _RAW,
    "bentoml": Form(_base64, lambda answer: np.frombuffer(b64decode(answer.json()[0]), np.float32)),
    "pytriton": _tensors("/v2/models/model/infer"),
}


class Bare:
    """ONNX Runtime in this process, with the settings of the engine's manifest."""

    def __init__(self, model: Path, manifest: EngineManifest) -> None:
        self.threads = int(manifest.settings["intra_op_threads"])
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = self.threads
        for entry, value in spin_config(onnxruntime.__version__).items():
            options.add_session_config_entry(entry, value)
        self._session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])

    def run(self, inputs: dict[str, Array]) -> Array:
        output: Array = self._session.run(None, inputs)[0]
        return output


@contextlib.contextmanager
def serving(
    platform: measure.Server, model: Path, *, max_batch: int, peers: tuple[str, ...]
) -> Iterator[tuple[Bare, list[measure.Server]]]:
    """Yield gpufn and the installed `peers`, after checking that each answers as the bare session does."""
    inputs = networks.inputs(model.stem)
    ((name, row),) = inputs.items()
    measure.deploy_file(platform, model, "--max-batch", str(max_batch), "--min", "1", "--max", "1")
    form = _tensors(f"/v2/models/{model.stem}/infer")
    ours = form.post(name, row)
    server = measure.Server("gpufn", platform.url + ours.path, platform.process, platform.environ, ours)
    answer = _answer(server, form)
    bare = Bare(model, _manifest(platform, model))
    expected = bare.run(inputs).reshape(-1)
    _check(server, answer, expected)
    servers = [server]
    session = json.dumps(spin_config(onnxruntime.__version__))
    environ = {
        "MODEL": str(model), "MAX_BATCH": str(max_batch), "THREADS": str(bare.threads), "SESSION": session,
    }  # fmt: skip
    with contextlib.ExitStack() as stack:
        for peer in peers:
            if (python := _python_of(peer)) is None:
                print(f"skipped {peer}: not installed", file=sys.stderr)
                continue
            form = _PEERS[peer]
            server = stack.enter_context(measure.peer(f"{peer}_model", python, form.post(name, row), **environ))
            server.name = peer
            _check(server, _answer(server, form), expected)
            servers.append(server)
        yield bare, servers


def versions() -> dict[str, str]:
    """Return the versions of the installed peers."""
    pythons = {peer: _python_of(peer) for peer in _PACKAGES}
    return {peer: measure.version_in(python, _PACKAGES[peer]) for peer, python in pythons.items() if python is not None}


def _python_of(peer: str) -> str | None:
    if peer == "uvicorn":
        return sys.executable
    python = measure.peers_python()
    return python if measure.has(python, peer) else None


def _manifest(platform: measure.Server, model: Path) -> EngineManifest:
    """Return the manifest of the engine that the worker runs, which the node has fetched."""
    for file in Path(platform.environ["GPUFN_HOME"]).glob(f"cache/engines/*/{MANIFEST_FILE}"):
        manifest = msgspec.json.decode(file.read_bytes(), type=EngineManifest)
        if manifest.model == model.name:
            return manifest
    raise RuntimeError(f"the node has no engine of {model.name}")


def _answer(server: measure.Server, form: Form) -> Array:
    post = server.post
    return form.read(httpx.post(server.url, content=post.body, headers=post.headers, timeout=60).raise_for_status())


def _check(server: measure.Server, actual: Array, expected: Array) -> None:
    if not np.allclose(actual, expected, atol=1e-3):
        raise RuntimeError(f"{server.name} answers differently from the bare session")
