from __future__ import annotations

import shutil
import subprocess
from typing import Any

import pytest

from tests.conftest import Platform

pytestmark = [pytest.mark.gpu, pytest.mark.e2e]


def test_a_node_reports_the_values_of_nvidia_smi(nvml: Any, platform: Platform) -> None:
    if (program := shutil.which("nvidia-smi")) is None:
        pytest.skip("there is no nvidia-smi on the PATH")
    command = [program, "--query-gpu=uuid,name,compute_cap,memory.total", "--format=csv,noheader,nounits"]
    told = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout
    expected = [tuple(line.split(", ")) for line in told.strip().splitlines()]
    (node,) = platform.client.get("/v1/nodes").json()["nodes"]
    gpus = [device for device in node["devices"] if device["type"] == "gpu"]
    seen = [(gpu["uuid"], gpu["kind"], gpu["compute_capability"]) for gpu in gpus]
    assert seen == [(uuid, name, capability) for uuid, name, capability, _ in expected]
    for gpu, (*_, mib) in zip(gpus, expected, strict=True):
        # Processes can use less than the card's memory, because the driver reserves some.
        assert int(mib) * 0.97 <= gpu["memory_bytes"] / 2**20 <= int(mib) + 1


def test_a_node_names_its_driver(nvml: Any, platform: Platform) -> None:
    (node,) = platform.client.get("/v1/nodes").json()["nodes"]
    assert node["facts"]["driver"] == nvml.nvmlSystemGetDriverVersion()
