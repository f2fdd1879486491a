"""Load a model's session: the best of its engines that works on this machine.

1. read `manifest.json` and verify the digests of its files
2. load the engine with the backend's module, which is imported only now
3. run the golden sample and compare the outputs (`golden_check`)
4. report a failed engine on standard error, which `gpufn logs` shows, and try the next one
5. on a GPU, warm up with each profile's usual shapes. On a CPU the golden sample has done that
"""

from __future__ import annotations

import hashlib
import importlib
import sys
from pathlib import Path

import msgspec
import numpy as np

from gpufn_core.domain.devices.engine import GOLDEN_FILE, MANIFEST_FILE, Backend, EngineManifest
from gpufn_core.protocol.launch import WorkerConfig
from gpufn_core.spec.model_spec import ShapeProfile, TensorSpec
from gpufn_runtime.worker.engines import golden_check
from gpufn_runtime.worker.engines.base import Array, EngineSession
from gpufn_runtime.worker.engines.session import Session
from gpufn_runtime.worker.engines.tensors import dtype_of

_MODULES = {
    Backend.TENSORRT: "gpufn_runtime.worker.engines.tensorrt",
    Backend.ORT_CUDA: "gpufn_runtime.worker.engines.onnxruntime",
    Backend.ORT_CPU: "gpufn_runtime.worker.engines.onnxruntime",
}


class NoEngine(Exception):
    """None of a model's engines works here. The message has a reason for each."""


class _Damaged(Exception):
    pass


def load_sessions(config: WorkerConfig) -> dict[str, Session]:
    """Return a session for each model of the function, by parameter. Raises NoEngine."""
    return {model.parameter: load_session(config, model.parameter) for model in config.spec.models}


def load_session(config: WorkerConfig, parameter: str) -> Session:
    """Return a session with the best working engine of `parameter`. Raises NoEngine."""
    folders = config.engines.get(parameter, ())
    if not folders:
        raise NoEngine(f"{parameter}: there is no engine for the device of this worker")
    reasons: list[str] = []
    for folder in map(Path, folders):
        try:
            return Session(_open(folder, config))
        except Exception as error:
            reasons.append(f"{folder.name[:12]}: {_first_line(error)}")
            more = "trying the next one" if len(reasons) < len(folders) else "there is no other engine"
            print(f"{parameter}: engine {reasons[-1]}; {more}", file=sys.stderr)  # noqa: T201
    raise NoEngine(f"{parameter}: no engine works on this machine. " + "; ".join(reasons))


def _open(folder: Path, config: WorkerConfig) -> EngineSession:
    manifest = msgspec.json.decode((folder / MANIFEST_FILE).read_bytes(), type=EngineManifest)
    _check_files(folder, manifest)
    inputs, outputs = golden_check.read(folder / GOLDEN_FILE, manifest)
    backend = importlib.import_module(_MODULES[manifest.backend])
    engine: EngineSession = backend.open_engine(
        manifest, folder, slots=config.spec.concurrency, cores=config.spec.resources.cpu
    )
    try:
        golden_check.compare(engine.run(inputs), outputs, manifest)
        if manifest.backend.on_gpu:
            for profile in manifest.profiles:
                engine.warm_up({spec.name: _zeros(spec, profile) for spec in manifest.inputs})
    except BaseException:
        engine.close()
        raise
    return engine


def _check_files(folder: Path, manifest: EngineManifest) -> None:
    for file in manifest.files:
        with open(folder / file.name, "rb") as content:
            digest = hashlib.file_digest(content, "sha256").hexdigest()
        if digest != file.digest:
            raise _Damaged(f"{file.name} is damaged: its digest is {digest[:12]}, but {file.digest[:12]} was published")


def _zeros(spec: TensorSpec, profile: ShapeProfile) -> Array:
    shape = profile.inputs[spec.name].opt if spec.name in profile.inputs else spec.shape
    return np.full(shape, "" if spec.datatype == "BYTES" else 0, dtype_of(spec.datatype))


def _first_line(error: Exception) -> str:
    text = str(error).strip() or type(error).__qualname__
    return text.splitlines()[0][:500]
