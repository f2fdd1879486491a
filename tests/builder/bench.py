"""A builder's parts on a real NATS server, fast enough for tests: engines are measured for milliseconds."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
from onnx import ModelProto, numpy_helper

from gpufn_builder import identity
from gpufn_builder.build_job import PROCESS, TIMEOUT_S, BuildExecutor, BuildOutcome
from gpufn_builder.processes.process_messages import MeasurePlan, ProgressUpdate
from gpufn_builder.processes.sandboxes import BuildSandboxes
from gpufn_builder.store import RETRY_FOR_S, Store
from gpufn_core.domain.devices.engine import Backend, Build
from gpufn_core.ids import new_ulid
from gpufn_core.protocol import subjects
from gpufn_core.spec.model_spec import ModelFile, ModelSpec
from gpufn_platform.bus.connection import Bus
from gpufn_platform.bus.storage import object_store, streams
from gpufn_platform.bus.storage.key_value import KeyValue
from gpufn_platform.process.clock import SystemClock
from gpufn_platform.signing.local_trust import LocalTrust
from gpufn_platform.signing.signatures import Signatures
from tests.builder.models import model, node, value

_QUICK = MeasurePlan(warm_up_s=0.001, least_s=0.003, most_s=0.02, trial_s=0.001)
_ROOT = str(Path(__file__).parents[2])


CPU = identity.cpu_target()


def ignore(update: ProgressUpdate) -> None: ...


def key_of(spec: Any) -> str:
    """The key of the model's engine for ONNX Runtime on a CPU."""
    return identity.identity(spec, CPU, Backend.ORT_CPU, identity.installed()[Backend.ORT_CPU]).key


async def report_of(bus: Any, ended: BuildOutcome) -> Any:
    return json.loads(await object_store.get(bus, subjects.ENGINE_FILES, ended.report))


def scaled(factor: float) -> ModelProto:
    """y = x * factor: a different model for each test."""
    constant = numpy_helper.from_array(np.array(factor, np.float32), "factor")
    return model([node("Mul", "x factor", "y")], [value("x", ["N", 3])], [value("y", ["N", 3])], [constant])


async def create_buckets(bus: Bus) -> None:
    """Create the streams and buckets that builders need, as a gateway does."""
    await streams.ensure_streams(bus)
    for store in (subjects.ENGINE_FILES, subjects.MODEL_FILES):
        await object_store.ensure_bucket(bus, store)
    for bucket in (subjects.BUILDS, subjects.ENGINES, subjects.LEASES, subjects.SIGNING):
        await KeyValue.open(bus, bucket)


async def upload(bus: Bus, proto: ModelProto, **options: Any) -> ModelSpec:
    """Store the model's file, and return a spec that refers to it."""
    data = proto.SerializeToString()
    digest = await object_store.put(bus, subjects.MODEL_FILES, data)
    assert digest == hashlib.sha256(data).hexdigest()
    return ModelSpec(**({"parameter": "net", "files": (ModelFile("model.onnx", digest, len(data)),)} | options))


async def damage_newest(bus: Bus, bucket: str) -> None:
    """Replace the bytes of the newest blob, which has one chunk."""
    chunk = await streams.last_message(bus, f"OBJ_{bucket}", f"$O.{bucket}.C.>")
    assert chunk is not None
    await streams.delete_message(bus, f"OBJ_{bucket}", chunk.seq)
    await bus.publish_stored(chunk.subject, b"?" + chunk.payload[1:])


def build_of(spec: ModelSpec, device: str = "cpu") -> Build:
    return Build(id=new_ulid(), model=spec, device=device, created_at=0.0)


async def open_executor(
    bus: Bus,
    folder: Path,
    *,
    process: str = PROCESS,
    retry_for_s: float = RETRY_FOR_S,
    timeout_s: float = TIMEOUT_S,
    signatures: Signatures | None = None,
    sandboxes: BuildSandboxes | None = None,
) -> tuple[BuildExecutor, Store]:
    store = Store(
        bus, KeyValue(bus, subjects.ENGINES), KeyValue(bus, subjects.LEASES), SystemClock(), retry_for_s=retry_for_s
    )
    executor = BuildExecutor(
        store,
        signatures=signatures or Signatures(KeyValue(bus, subjects.SIGNING), LocalTrust()),
        folder=folder / "builds",
        caches=folder / "tuning",
        environ=os.environ | {"PYTHONPATH": os.pathsep.join([_ROOT, os.environ.get("PYTHONPATH", "")])},
        clock=SystemClock(),
        memory_limit_bytes=8 << 30,
        timeout_s=timeout_s,
        measuring=_QUICK,
        process=process,
        sandboxes=sandboxes,
    )
    return executor, store
