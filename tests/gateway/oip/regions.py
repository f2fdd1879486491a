"""Regions of shared memory for tests: in a folder of the test, at a gateway with one model."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from gpufn_core.protocol.codec import encode
from gpufn_core.spec.function_spec import Batch
from gpufn_gateway.auth.access import LOCAL
from gpufn_gateway.oip.shared_memory.files import ClientFiles
from gpufn_gateway.oip.shared_memory.regions import Regions, Slice
from gpufn_platform.bus.storage.key_value import Entry
from tests.gateway.oip.test_inference import manifest, model, same

OWNER = LOCAL.owner
REGION = "/v2/systemsharedmemory/region/r"
INFER = "/v2/models/same/infer"
ROW = np.array([[1.5, 2.0]], np.float32)
SIZE = ROW.nbytes


def gateway_with(make: Any, clock: Any, regions: Regions | None, **given: Any) -> Any:
    gateway = make.Gateway(clock, regions=regions, **given)
    gateway.registry.on_engine("k", Entry("k", encode(manifest()), 1))
    gateway.deploy(model(batch=Batch(8, max_wait_ms=2)), 3, {"net": {"cpu": ("k",)}})
    gateway.report(make.status("same", 3))
    gateway.queue.answer = same
    if regions is not None:
        gateway.registry.on_key_deleted.append(regions.forget)
    return gateway


class Folder:
    """A folder in place of /dev/shm, and regions in it whose prefix is `t-`."""

    def __init__(self, path: Path, uid: int | None = None) -> None:
        self.path = path
        self.regions = Regions("t-", ClientFiles(os.getuid() if uid is None else uid, path))

    def file(self, name: str = "t-a", size: int = 64) -> Path:
        path = self.path / name
        path.write_bytes(bytes(range(256))[:size].ljust(size, b"\1"))
        return path

    def register(self, key: str = "t-a", **given: Any) -> Any:
        fields: dict[str, Any] = {"offset": 0, "byte_size": 64, "owner": OWNER, "name": "r"} | given
        return self.regions.register(key=key, **fields)

    def read(self, piece: Slice) -> bytes:
        buffer = bytearray(piece.size)
        self.regions.read_into(memoryview(buffer), piece, 0)
        return bytes(buffer)


def request(shape: Any, size: Any, *, output: tuple[Any, Any] | None = None, **given: Any) -> bytes:
    """A request whose input, and with `output` (size and offset) whose output, are in the region r."""
    parameters = {"shared_memory_region": "r", "shared_memory_byte_size": size} | given
    head: dict[str, Any] = {
        "inputs": [{"name": "fp32", "datatype": "FP32", "shape": list(shape), "parameters": parameters}]
    }
    if output is not None:
        given = {"shared_memory_byte_size": output[0], "shared_memory_offset": output[1]}
        head["outputs"] = [{"name": "fp32_out", "parameters": {"shared_memory_region": "r", **given}}]
    return msgspec.json.encode(head)
