"""A GPU's own control daemon, with NVIDIA's programs, and a client of it; no platform around them."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from gpufn_core.domain.devices.device import DeviceShare, Share
from gpufn_core.spec.priority import Priority
from gpufn_runtime.agent.mps.client import client_environment
from gpufn_runtime.agent.mps.condition import Condition
from gpufn_runtime.agent.mps.daemon import Daemon

pytestmark = pytest.mark.gpu

_ROUNDED_BY = 4  # multiprocessors: MPS assigns them in small groups
_START_TIMEOUT_S = 60.0
# Prints its view of the GPU in one line, and runs until its input ends.
_CLIENT = """
import json, sys, torch
def refused(gib):
    try:
        torch.empty(gib << 30, dtype=torch.uint8, device="cuda")
    except torch.OutOfMemoryError:
        return True
    return False
seen = torch.cuda.get_device_properties(0).multi_processor_count
print(json.dumps({"multiprocessors": seen, "refused": [refused(1), refused(4)]}), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def gpu(nvml: Any) -> str:
    """The first one's uuid."""
    if shutil.which("nvidia-cuda-mps-control") is None:
        pytest.skip("there is no nvidia-cuda-mps-control on the PATH")
    uuid = nvml.nvmlDeviceGetUUID(nvml.nvmlDeviceGetHandleByIndex(0))
    return uuid if isinstance(uuid, str) else uuid.decode()


@pytest.fixture
def folder() -> Iterator[Path]:
    """Its path is short: a daemon listens on unix sockets in it."""
    with tempfile.TemporaryDirectory(prefix="mps-") as name:
        yield Path(name) / "gpu"


def test_the_daemon_becomes_active_ends_on_request_and_changes_no_setting_of_the_gpu(
    nvml: Any, gpu: str, folder: Path
) -> None:
    handle = nvml.nvmlDeviceGetHandleByUUID(gpu)
    before = nvml.nvmlDeviceGetComputeMode(handle)

    async def work() -> None:
        daemon = Daemon(gpu, folder, uid=os.getuid())
        await daemon.start()
        try:
            assert await daemon.observe() is Condition.ACTIVE
        finally:
            await daemon.stop()
        assert await daemon.observe() is Condition.DOWN

    asyncio.run(work())
    assert not folder.exists()
    assert nvml.nvmlDeviceGetComputeMode(handle) == before


def test_the_daemon_knows_a_client_and_enforces_its_limits(gpu: str, folder: Path) -> None:
    if find_spec("torch") is None:
        pytest.skip("torch is not installed")
    share = DeviceShare("cpu", 1.0, 0, gpus=(gpu,), mode=Share.MPS, vram_bytes=2 << 30, sm_percent=25)

    async def seen_by_a_client(environ: dict[str, str], daemon: Daemon | None) -> Any:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-c",
            _CLIENT,
            env=os.environ | {"CUDA_VISIBLE_DEVICES": gpu} | environ,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        async with asyncio.timeout(_START_TIMEOUT_S):
            told = json.loads(await process.stdout.readline())
        if daemon is not None:
            assert process.pid in await daemon.clients()
        process.stdin.close()
        assert await process.wait() == 0
        return told

    async def work() -> tuple[Any, Any]:
        whole = await seen_by_a_client({}, None)
        daemon = Daemon(gpu, folder, uid=os.getuid())
        await daemon.start()
        try:
            return whole, await seen_by_a_client(client_environment(share, daemon.pipe, Priority.NORMAL), daemon)
        finally:
            await daemon.stop()

    whole, part = asyncio.run(work())
    assert whole["refused"] == [False, False]
    assert part["refused"] == [False, True]
    assert abs(part["multiprocessors"] - whole["multiprocessors"] / 4) <= _ROUNDED_BY
