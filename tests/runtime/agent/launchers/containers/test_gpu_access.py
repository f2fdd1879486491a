"""How a node's containers get GPUs, by what Docker reports and which programs exist."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gpufn_runtime.agent.launchers.containers.gpu_access import GpuDriver, gpu_driver, has_hook

_GPU = "GPU-4b1f7e9c-0d53-4f3c-9a0e-6d2f6f6b1c11"


def _devices(*names: str) -> dict[str, Any]:
    return {"DiscoveredDevices": [{"Source": "cdi", "ID": name} for name in names]}


@pytest.mark.parametrize(
    ("info", "has_hook", "driver"),
    [
        ({}, True, GpuDriver.HOOK),
        (_devices(f"nvidia.com/gpu={_GPU}"), True, GpuDriver.HOOK),
        (_devices("nvidia.com/gpu=0", f"nvidia.com/gpu={_GPU}", "nvidia.com/gpu=all"), False, GpuDriver.CDI),
        (_devices("nvidia.com/gpu=MIG-1f7e"), False, GpuDriver.CDI),
        (_devices("nvidia.com/gpu=0", "nvidia.com/gpu=all"), False, None),  # requests name GPUs by uuid
        (_devices("vendor.com/net=GPU-1"), False, None),
        ({"DiscoveredDevices": None}, False, None),
        ({"Runtimes": {"nvidia": {"path": "nvidia-container-runtime"}}}, False, None),  # `--gpus` does not use it
    ],
)
def test_containers_get_gpus_by_the_hook_or_by_cdi(info: dict[str, Any], has_hook: bool, driver: GpuDriver) -> None:
    assert gpu_driver(info, has_hook=has_hook) is driver


def test_the_hook_is_a_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert not has_hook(daemon_path=str(tmp_path / "bin"))
    hook = tmp_path / "bin" / "nvidia-container-runtime-hook"
    hook.parent.mkdir()
    hook.touch(0o755)
    assert has_hook(daemon_path=str(hook.parent))
    monkeypatch.setenv("PATH", str(hook.parent))
    assert has_hook(daemon_path="")
