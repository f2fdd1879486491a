from __future__ import annotations

from pathlib import Path

import pytest

from gpufn_runtime.agent.isolation import gpu_devices


@pytest.mark.parametrize(
    ("devices", "runs"), [([], False), (["nvidiactl"], True), (["nvidiactl", "nvidia-uvm"], False)]
)
def test_the_device_of_cuda_is_created_where_the_driver_has_none(
    tmp_path: Path, devices: list[str], runs: bool
) -> None:
    for name in devices:
        (tmp_path / name).touch()
    program, mark = tmp_path / "nvidia-modprobe", tmp_path / "ran"
    program.write_text(f'#!/bin/sh\necho "$@" > {mark}')
    program.chmod(0o755)
    gpu_devices.create(tmp_path, lambda name: str(tmp_path / name))
    assert mark.exists() == runs


def test_a_program_that_fails_or_is_missing_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "nvidiactl").touch()
    gpu_devices.create(tmp_path, lambda name: None)
    gpu_devices.create(tmp_path, lambda name: str(tmp_path / "missing"))
    assert len(caplog.records) == 2
