"""Settings of a container, without Docker."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpufn_core.domain.devices.device import NO_MPS
from gpufn_core.protocol.launch import MountedVolume, WorkerConfig
from gpufn_core.spec.function_spec import EntryPoint, FunctionSpec, MethodSpec
from gpufn_core.spec.weights_spec import WeightsFile, WeightsSpec
from gpufn_runtime.agent.launchers.containers.gpu_access import GpuDriver
from gpufn_runtime.agent.launchers.containers.sandbox import Limits, Sandbox, config_in_container, sandbox
from gpufn_runtime.agent.mps.base import Mounts

FOLDER = WeightsSpec(source="./weights", files=(WeightsFile("w", 1, "a" * 64),))
FILE = WeightsSpec(source="./w", is_file=True, files=(WeightsFile("w", 1, "b" * 64),))


def made(limits: Limits, modules: tuple[str, ...] = (), *, gpu_driver: GpuDriver = GpuDriver.HOOK) -> Sandbox:
    return sandbox(
        limits,
        uid=1_900_000_001,
        folder=Path("/node/run/c/c-1"),
        shared_bodies=Path("/dev/shm/home/c-1"),
        packages=["/src/gpufn"],
        modules=modules,
        gpu_driver=gpu_driver,
    )


def test_a_worker_has_only_granted_rights() -> None:
    host = made(Limits(256 << 20, 0.5)).host_config
    assert {
        name: host[name]
        for name in (
            "network_mode",
            "cap_drop",
            "security_opt",
            "read_only",
            "pids_limit",
            "device_requests",
            "ipc_mode",
        )
    } == {
        "network_mode": "none",
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges:true"],
        "read_only": True,
        "pids_limit": 1024,
        "device_requests": None,
        "ipc_mode": "private",
    }
    assert (host["mem_limit"], host["memswap_limit"], host["cpu_shares"]) == (256 << 20, 256 << 20, 5120)


def test_only_its_shared_bodies_are_mounted_to_be_written() -> None:
    host = made(Limits(256 << 20, 0.5)).host_config
    assert {(mount["Source"], mount["Target"], mount["ReadOnly"]) for mount in host["mounts"]} == {
        ("/node/run/c/c-1", "/gpufn/worker", True),
        ("/dev/shm/home/c-1", "/gpufn/shared_bodies", False),
        ("/src/gpufn", "/gpufn/lib/gpufn", True),
    }
    assert host["tmpfs"] == {"/tmp": f"rw,nosuid,nodev,size={128 << 20},mode=1777"}


@pytest.mark.parametrize(
    ("mps", "mounted"),
    [
        (Mounts("/run/p", 7), {("/run/p", "/gpufn/mps", False)}),
        (Mounts("/run/p", 7, "/dev/shm/m"), {("/run/p", "/gpufn/mps", False), ("/dev/shm/m", "/dev/shm", False)}),
    ],
)
def test_a_worker_that_shares_a_gpu_has_the_mounts_of_a_client(
    mps: Mounts, mounted: set[tuple[str, str, bool]]
) -> None:
    without, mounts = (made(Limits(1 << 30, 1.0, mps=each)).host_config["mounts"] for each in (None, mps))
    added = [mount for mount in mounts if mount not in without]
    assert {(mount["Source"], mount["Target"], mount["ReadOnly"]) for mount in added} == mounted


@pytest.mark.parametrize(
    ("limits", "what", "value"),
    [
        (Limits(1 << 30, 1.0, egress=True), "network_mode", "bridge"),
        (Limits(1 << 30, 0.0001), "cpu_shares", 2),
        (Limits(1 << 30, 0.1), "cpu_shares", 1024),
        (Limits(1 << 30, 99.0), "cpu_shares", 262_144),
        (
            Limits(1 << 30, 1.0, gpus=("GPU-1", "GPU-2")),
            "device_requests",
            [
                {
                    "Driver": "nvidia",
                    "DeviceIDs": ["GPU-1", "GPU-2"],
                    "Capabilities": [["gpu", "compute", "utility"]],
                }
            ],
        ),
    ],
)
def test_requested_resources_are_set(limits: Limits, what: str, value: Any) -> None:
    assert made(limits).host_config[what] == value


def test_gpus_are_requested_by_their_cdi_names_without_the_hook() -> None:
    limits = Limits(1 << 30, 1.0, gpus=("GPU-1", "GPU-2"))
    requests = made(limits, gpu_driver=GpuDriver.CDI).host_config["device_requests"]
    assert requests == [{"Driver": "cdi", "DeviceIDs": ["nvidia.com/gpu=GPU-1", "nvidia.com/gpu=GPU-2"]}]
    assert made(Limits(1 << 30, 1.0), gpu_driver=GpuDriver.CDI).host_config["device_requests"] is None


def test_an_image_made_for_gpus_sees_only_its_leased_gpus() -> None:
    assert made(Limits(1 << 30, 1.0)).container_config["environment"]["NVIDIA_VISIBLE_DEVICES"] == "void"
    environment = made(Limits(1 << 30, 1.0, gpus=("GPU-1",))).container_config["environment"]
    assert environment["NVIDIA_VISIBLE_DEVICES"] == "GPU-1"


def test_imports_stay_away_from_an_mps_daemon_of_the_host() -> None:
    """NVIDIA's hook mounts its folder, and imports come before the worker's own environment."""
    limits = Limits(1 << 30, 1.0, gpus=("GPU-1",))
    pipes = [
        made(each).container_config["environment"]["CUDA_MPS_PIPE_DIRECTORY"]
        for each in (limits, replace(limits, mps=Mounts("/run/pipe", 7)))
    ]
    assert pipes == [NO_MPS["CUDA_MPS_PIPE_DIRECTORY"], "/gpufn/mps"]


def test_modules_are_imported_with_the_variables_of_the_function_and_find_the_usual_values() -> None:
    env = {"HF_HOME": "/data", "OMP_NUM_THREADS": "1", "HOME": "/data/mine"}
    reserved = {"PATH": "/mine", "PYTHONPATH": "/mine", "PYTHONHOME": "/mine", "NVIDIA_GDS": "enabled"}
    without = made(Limits(1 << 30, 1.0)).container_config["environment"]
    environment = made(Limits(1 << 30, 1.0, env=frozenset((env | reserved).items()))).container_config["environment"]
    assert environment == without | env


def test_it_imports_the_modules_of_its_worker() -> None:
    config = made(Limits(1 << 30, 1.0), modules=("torch", "numpy")).container_config
    assert config["entrypoint"][-3:] == ["--contained", "numpy", "torch"]
    assert config["user"] == "1900000001:1900000001"


def test_a_worker_receives_the_paths_inside_its_container() -> None:
    config = WorkerConfig(
        worker="w-1",
        function="f",
        revision=1,
        spec=FunctionSpec(name="f", entry=EntryPoint("app", "f"), methods=(MethodSpec(),), weights=(FOLDER, FILE)),
        weights=(f"/node/folders/{FOLDER.digest}", f"/node/folders/{FILE.digest}/w"),
        volumes=(MountedVolume("models", "/node/folders/abc", 3, "abc"),),
        bundle_dir="/node/cache/bundles/abc",
        socket="/node/run/w/w-1/s",
        secrets_socket="/node/run/w/w-1/k",
        shared_bodies="/dev/shm/home/w-1",
        launched_at=1.0,
        engines={"net": ("/node/cache/engines/k1", "/node/cache/engines/k2")},
        memory_limit_bytes=1 << 30,
        open_files=1024,
    )
    told = config_in_container(config)
    assert (told.bundle_dir, told.socket, told.shared_bodies) == (
        "/gpufn/worker/bundle",
        "/gpufn/worker/s",
        "/gpufn/shared_bodies",
    )
    assert told.secrets_socket == "/gpufn/worker/k"
    assert told.engines == {"net": ("/gpufn/worker/engines/k1", "/gpufn/worker/engines/k2")}
    assert told.weights == (f"/gpufn/worker/weights/{FOLDER.digest}", f"/gpufn/worker/weights/{FILE.digest}/w")
    assert told.volumes == (MountedVolume("models", "/gpufn/worker/volumes/abc", 3, "abc"),)
    assert (told.memory_limit_bytes, told.cgroup_procs, told.open_files) == (None, (), None)
