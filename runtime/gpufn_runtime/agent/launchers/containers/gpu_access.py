"""Access of this node's containers to GPUs: by NVIDIA's hook, or by CDI (Container Device Interface).

Docker's device driver "nvidia" runs the program `nvidia-container-runtime-hook`, which the daemon finds on its PATH. A
runtime "nvidia" in Docker's configuration is neither needed for that nor sufficient. Docker's driver "cdi" adds devices
by the names in CDI specs. `docker info` reports the names since Engine API 1.50 (Docker 28.2), so gpufn reads no specs.
The hook comes first, because specs may be older than the node's MIG instances (moby, pull request 52704).

Sources: moby, `daemon/devices_nvidia_linux.go` and pull request 50228; Engine API, SystemInfo.DiscoveredDevices.
"""

from __future__ import annotations

import enum
import os
import shutil
from collections.abc import Mapping
from typing import Any, Final

NO_GPU_ACCESS: Final = (
    "Docker has neither nvidia-container-runtime-hook nor CDI devices named by uuid, which Docker 28.2 and later "
    "report: install nvidia-container-toolkit there"
)
CDI_KIND: Final = "nvidia.com/gpu"
_HOOK = "nvidia-container-runtime-hook"
_DAEMON_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"  # systemd's default for services


class GpuDriver(enum.StrEnum):
    """Docker's name for the driver of a device request."""

    HOOK = "nvidia"
    CDI = "cdi"


def gpu_driver(docker_info: Mapping[str, Any], *, has_hook: bool) -> GpuDriver | None:
    """Return the driver that adds GPUs by uuid, or None if this node has none."""
    if has_hook:
        return GpuDriver.HOOK
    names = (str(device.get("ID")) for device in docker_info.get("DiscoveredDevices") or ())
    has_uuids = any(name.startswith((f"{CDI_KIND}=GPU-", f"{CDI_KIND}=MIG-")) for name in names)
    return GpuDriver.CDI if has_uuids else None


def has_hook(daemon_path: str = _DAEMON_PATH) -> bool:
    return shutil.which(_HOOK, path=f"{os.environ.get('PATH', '')}:{daemon_path}") is not None
