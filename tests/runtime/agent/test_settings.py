from __future__ import annotations

import sys
from pathlib import Path

import pytest

from gpufn_core.domain.devices.device import Device, DeviceType
from gpufn_core.spec.image_spec import ImageSpec
from gpufn_platform.process.settings import InvalidSetting
from gpufn_runtime.agent.devices.declared import DeclaredInventory, cpu_pool
from gpufn_runtime.agent.settings import AgentSettings

URL = {"GPUFN_NATS_URL": "nats://agent:x@127.0.0.1:4222", "GPUFN_HOME": "/tmp/h"}
L4 = '[{"uuid": "GPU-1", "type": "gpu", "kind": "NVIDIA L4", "memory_bytes": 24000000000}]'


def test_the_environment_is_read() -> None:
    settings = AgentSettings.from_env({**URL, "GPUFN_NODE": "gpu-box-7", "GPUFN_TEMPLATES": "2"})
    assert (settings.node, settings.templates, settings.grace_s) == ("gpu-box-7", 2, 30.0)
    assert settings.home.root == Path("/tmp/h")
    assert AgentSettings.from_env({**URL, "GPUFN_NODE_ADDRESS": "fd00::7"}).address == "fd00::7"


@pytest.mark.parametrize(
    ("environ", "names"),
    [
        ({}, "GPUFN_NATS_URL"),
        ({**URL, "GPUFN_TEMPLATES": "many"}, "GPUFN_TEMPLATES"),
        ({**URL, "GPUFN_TEMPLATES": "2.9"}, r"^GPUFN_TEMPLATES='2.9' is not a whole number from 0 to 1000\.$"),
        ({**URL, "GPUFN_TEMPLATES": "-1"}, "^GPUFN_TEMPLATES='-1' is not a whole number"),
        ({**URL, "GPUFN_GRACE": "-1"}, "GPUFN_GRACE"),
        ({**URL, "GPUFN_PARK_MEMORY": "a lot"}, "GPUFN_PARK_MEMORY"),
        ({**URL, "GPUFN_PARK_MEMORY": "64"}, "write GPUFN_PARK_MEMORY='64Mi'"),
        ({**URL, "GPUFN_MEMORY": "4"}, "write GPUFN_MEMORY='512Mi'"),
        ({**URL, "GPUFN_DEVICES": '{"uuid": 1}'}, "GPUFN_DEVICES"),
        ({**URL, "GPUFN_GPU_POWER_LIMIT": "300 W"}, "GPUFN_GPU_POWER_LIMIT"),
        ({**URL, "GPUFN_GPU_POWER_LIMIT": "0"}, "GPUFN_GPU_POWER_LIMIT='0': write watts"),
        ({**URL, "GPUFN_GPU_POWER_LIMIT": "=300"}, "GPUFN_GPU_POWER_LIMIT='=300': write watts"),
        ({**URL, "GPUFN_LAUNCHER": "podman"}, "GPUFN_LAUNCHER"),
        ({**URL, "GPUFN_BASE_IMAGE": "python:{version}"}, "GPUFN_BASE_IMAGE"),
        ({**URL, "GPUFN_BASE_IMAGE": "python:3 RUN"}, "GPUFN_BASE_IMAGE"),
        ({**URL, "GPUFN_NODE_ADDRESS": "10.0.0.7:4222"}, "GPUFN_NODE_ADDRESS"),
        ({**URL, "GPUFN_NODE_ADDRESS": "http://box"}, "GPUFN_NODE_ADDRESS"),
    ],
)
def test_an_error_names_the_variable(environ: dict[str, str], names: str) -> None:
    with pytest.raises(InvalidSetting, match=names):
        AgentSettings.from_env(environ)


@pytest.mark.parametrize(("given", "park_bytes"), [("", None), ("0", 0), ("2Gi", 2 << 30)])
def test_memory_for_parked_workers_is_a_size(given: str, park_bytes: int | None) -> None:
    assert AgentSettings.from_env({**URL, "GPUFN_PARK_MEMORY": given}).park_bytes == park_bytes


@pytest.mark.parametrize(("given", "means"), [("yes", True), ("TRUE", True), ("1", True), ("no", False), ("", False)])
def test_yes_and_no_are_the_words_that_a_gateway_accepts(given: str, means: bool) -> None:
    assert AgentSettings.from_env({**URL, "GPUFN_MPS_EXCLUSIVE": given}).mps_exclusive is means
    with pytest.raises(InvalidSetting, match=r"^GPUFN_MPS_EXCLUSIVE='perhaps': .*yes or no"):
        AgentSettings.from_env({**URL, "GPUFN_MPS_EXCLUSIVE": "perhaps"})


def test_the_hosts_memory_is_the_operators_setting_or_else_the_kernels_value() -> None:
    assert AgentSettings.from_env(URL).memory_bytes is None
    said = AgentSettings.from_env({**URL, "GPUFN_MEMORY": "64Gi"}).memory_bytes
    assert said == 64 << 30
    assert cpu_pool("n", memory_bytes=said).memory_bytes == said
    assert 0 < cpu_pool("n").memory_bytes < 1 << 60


def test_a_function_without_an_image_gets_one_only_where_docker_launches() -> None:
    assert AgentSettings.from_env(URL).default_image is None
    image = AgentSettings.from_env({**URL, "GPUFN_LAUNCHER": "docker"}).default_image
    assert image == ImageSpec(python=f"{sys.version_info.major}.{sys.version_info.minor}")


@pytest.mark.parametrize(
    ("given", "host"),
    [
        ({}, "unix:///var/run/docker.sock"),
        ({"DOCKER_HOST": "unix:///d"}, "unix:///d"),
        ({"DOCKER_HOST": "unix:///d", "GPUFN_DOCKER_HOST": "unix:///g"}, "unix:///g"),
    ],
)
def test_the_daemon_is_ours_before_everybodys(given: dict[str, str], host: str) -> None:
    assert AgentSettings.from_env(URL | given).docker_host == host


def test_declared_devices_stand_beside_the_cpu_pool() -> None:
    declared = AgentSettings.from_env({**URL, "GPUFN_DEVICES": L4}).devices
    devices = DeclaredInventory(declared, cpu_pool("n")).find().devices
    assert [(device.uuid, device.type) for device in devices] == [("cpu-n", "cpu"), ("GPU-1", "gpu")]
    own = Device("mine", DeviceType.CPU, "CPU", 1 << 30, 1.0)
    assert DeclaredInventory((own,), cpu_pool("n")).find().devices == (own,)


def test_the_cpu_pool_is_the_allowance_of_cgroup_and_affinity(tmp_path: Path) -> None:
    proc, cgroup = tmp_path / "proc", tmp_path / "cgroup"
    proc.mkdir()
    cgroup.mkdir()
    (proc / "meminfo").write_text("MemTotal:       16000000 kB\nMemFree: 1 kB\n")
    (proc / "cpuinfo").write_text("processor : 0\nmodel name\t: A CPU\n")
    free = cpu_pool("n", proc, cgroup)
    assert (free.kind, free.memory_bytes) == ("A CPU", 16_000_000 * 1024)
    assert free.cores >= 1
    (cgroup / "cpu.max").write_text("50000 100000\n")
    (cgroup / "memory.max").write_text("1000000000\n")
    held = cpu_pool("n", proc, cgroup)
    assert (held.cores, held.memory_bytes) == (0.5, 1_000_000_000)
