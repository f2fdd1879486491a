"""Settings of the agent, from environment variables."""

from __future__ import annotations

import ipaddress
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field

from gpufn_core.domain.devices.device import Device
from gpufn_core.errors import InvalidSpec
from gpufn_core.home import Home
from gpufn_core.spec.image_spec import ImageSpec
from gpufn_platform.process.grace_period import GRACE_S
from gpufn_platform.process.settings import (
    InvalidSetting,
    bus_url,
    node_name,
    number,
    process_memory,
    size,
    volume_store_address,
    whole_number,
    yes_or_no,
)
from gpufn_platform.sandbox.policy import Isolation, isolation
from gpufn_runtime.agent.devices.declared import parse_devices
from gpufn_runtime.agent.devices.power_limits import parse_power_limits
from gpufn_runtime.agent.egress.rules import Network
from gpufn_runtime.agent.isolation.sandboxes import Folder

_MAX_TEMPLATES = 1000
IMAGE_BUILD_DISK_BYTES = 64 << 30
_ADDRESS = re.compile(r"[A-Za-z0-9.-]{0,253}|[0-9A-Fa-f:]{2,45}")


@dataclass(frozen=True)
class AgentSettings:
    """GPUFN_NODE            this node's name. Default: the host name
    GPUFN_NATS_URL        URL of the NATS server, with credentials; required
    GPUFN_NODE_ADDRESS    address or host name where the other nodes of a gang reach this node. Default: the local
                          address of the route to the NATS server
    GPUFN_HOME            folder for state. Default: ~/.gpufn
    GPUFN_DEVICES         JSON array of devices, which replaces device detection
    GPUFN_MEMORY          memory of this host for workers, such as 64Gi. Default: the memory that the kernel reports,
                          which is too little on a virtual machine with dynamic memory
    GPUFN_TEMPLATES       maximum number of templates kept in memory; 0 for none. Default: 4
    GPUFN_PARK_MEMORY     memory of this host for parked workers, such as 16Gi; 0 for none. Default: a quarter
    GPUFN_WEIGHTS_DISK    disk space of this host for weights, such as 500Gi. Default: half of the disk
    GPUFN_VOLUME_STORE    files of volumes: s3://bucket/folder, as the gateway's setting. Default: the bus
    GPUFN_ENVIRONMENTS_DISK  disk space of this host for environments with packages, such as 50Gi. Default: a quarter
                          of the disk
    GPUFN_IMAGE_BUILD_MEMORY  memory of a step that makes an environment, such as 8Gi. Default: half of the machine's
    GPUFN_IMAGE_BUILD_DISK  disk space of an environment while it is made, such as 20Gi. Default: 64Gi
    GPUFN_GRACE           seconds that running calls may take to finish when the agent stops. Default: 30
    GPUFN_MPS_EXCLUSIVE   yes: only MPS clients may use a GPU that is shared by MPS (compute mode EXCLUSIVE_PROCESS,
                          which needs root). Default: no
    GPUFN_GPU_POWER_LIMIT  power limit of GPUs in watts, such as 300, or by kind, such as H100=500,L4=60. The agent sets
                          it, which needs root, and restores the old one when it stops. Default: none
    GPUFN_LAUNCHER        where functions without an image run: process or docker. Default: process
    GPUFN_ISOLATION       sandbox of worker processes. auto: with the parts that the kernel allows; strict: with all
                          parts, or the agent does not start; off: none, for debugging. Default: auto
    GPUFN_SANDBOX_FOLDERS  folders that all workers in sandboxes may read, such as /data,/scratch:rw; with :rw they may
                          also write. Default: none
    GPUFN_EGRESS_ALLOW    networks that workers with network="egress" may reach besides the internet, such as
                          10.1.0.0/16,192.168.7.20/32. Default: none
    GPUFN_BASE_IMAGE      base image for a version of Python. Default: python:{python}-slim
    GPUFN_BUILD_NETWORK   Docker network for image builds. Default: Docker's own
    GPUFN_SUPERVISOR_FIFO  FIFO that the agent's supervisor holds open for writing; workers end when it closes. Set by
                          `gpufn up`
    GPUFN_DOCKER_HOST     Docker daemon. Default: DOCKER_HOST, or unix:///var/run/docker.sock
    """

    node: str
    nats_url: str
    home: Home
    devices: tuple[Device, ...] = ()
    memory_bytes: int | None = None
    templates: int = 4
    park_bytes: int | None = None
    weights_bytes: int | None = None
    volume_store: str = ""
    environments_bytes: int | None = None
    image_build_memory_bytes: int = 0
    image_build_disk_bytes: int = IMAGE_BUILD_DISK_BYTES
    grace_s: float = GRACE_S
    mps_exclusive: bool = False
    gpu_power_limits: Mapping[str, float] = field(default_factory=dict)
    default_image: ImageSpec | None = None
    isolation: Isolation = Isolation.AUTO
    sandbox_folders: tuple[Folder, ...] = ()
    egress_allow: tuple[Network, ...] = ()
    base_image: str = "python:{python}-slim"
    build_network: str = ""
    docker_host: str = "unix:///var/run/docker.sock"
    supervisor_fifo: str = ""
    address: str = ""

    @classmethod
    def from_env(cls, environ: Mapping[str, str] = os.environ) -> AgentSettings:
        """Raises InvalidSetting."""
        return cls(
            node=node_name(environ),
            nats_url=bus_url(environ),
            home=Home.from_env(environ),
            devices=parse_devices(environ["GPUFN_DEVICES"]) if environ.get("GPUFN_DEVICES") else (),
            memory_bytes=_size(environ, "GPUFN_MEMORY"),
            templates=whole_number(
                "GPUFN_TEMPLATES", environ.get("GPUFN_TEMPLATES") or str(cls.templates), 0, _MAX_TEMPLATES
            ),
            park_bytes=_size(environ, "GPUFN_PARK_MEMORY"),
            weights_bytes=size("GPUFN_WEIGHTS_DISK", text) if (text := environ.get("GPUFN_WEIGHTS_DISK")) else None,
            volume_store=volume_store_address(environ),
            environments_bytes=size("GPUFN_ENVIRONMENTS_DISK", text)
            if (text := environ.get("GPUFN_ENVIRONMENTS_DISK"))
            else None,
            image_build_memory_bytes=_build_memory(environ.get("GPUFN_IMAGE_BUILD_MEMORY", "")),
            image_build_disk_bytes=size("GPUFN_IMAGE_BUILD_DISK", text)
            if (text := environ.get("GPUFN_IMAGE_BUILD_DISK"))
            else IMAGE_BUILD_DISK_BYTES,
            grace_s=number("GPUFN_GRACE", environ.get("GPUFN_GRACE") or str(GRACE_S)),
            mps_exclusive=yes_or_no("GPUFN_MPS_EXCLUSIVE", environ.get("GPUFN_MPS_EXCLUSIVE") or "no"),
            gpu_power_limits=parse_power_limits(environ.get("GPUFN_GPU_POWER_LIMIT", "")),
            default_image=_default_image(environ.get("GPUFN_LAUNCHER") or "process"),
            isolation=isolation(environ.get("GPUFN_ISOLATION", "")),
            sandbox_folders=folders(environ.get("GPUFN_SANDBOX_FOLDERS", "")),
            egress_allow=networks(environ.get("GPUFN_EGRESS_ALLOW", "")),
            base_image=_base_image(environ.get("GPUFN_BASE_IMAGE") or cls.base_image),
            build_network=environ.get("GPUFN_BUILD_NETWORK", ""),
            docker_host=environ.get("GPUFN_DOCKER_HOST") or environ.get("DOCKER_HOST") or cls.docker_host,
            supervisor_fifo=environ.get("GPUFN_SUPERVISOR_FIFO", ""),
            address=_address(environ.get("GPUFN_NODE_ADDRESS", "")),
        )


def _address(text: str) -> str:
    if _ADDRESS.fullmatch(text) is None:
        raise InvalidSetting(
            f"GPUFN_NODE_ADDRESS must be an address or a host name without a port, such as 10.0.0.7, not {text!r}."
        )
    return text


def _build_memory(text: str) -> int:
    if not text:
        return int(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2)
    return process_memory("GPUFN_IMAGE_BUILD_MEMORY", text, "a step of a build")


def _size(environ: Mapping[str, str], name: str) -> int | None:
    if not (text := environ.get(name, "")):
        return None
    return 0 if text == "0" else process_memory(name, text, "a worker")


def _default_image(launcher: str) -> ImageSpec | None:
    """Return the default image: with this node's version of Python, because pickles need the same version."""
    if launcher not in ("process", "docker"):
        raise InvalidSetting(f"GPUFN_LAUNCHER must be process or docker, not {launcher!r}.")
    return ImageSpec(python="{}.{}".format(*sys.version_info)) if launcher == "docker" else None


def networks(text: str) -> tuple[Network, ...]:
    """Parse GPUFN_EGRESS_ALLOW. Raises InvalidSetting.

    >>> networks("10.1.0.0/16, 192.168.7.20")
    (IPv4Network('10.1.0.0/16'), IPv4Network('192.168.7.20/32'))
    """
    try:
        return tuple(ipaddress.ip_network(item.strip()) for item in text.split(",") if item.strip())
    except ValueError as error:
        raise InvalidSetting(f"GPUFN_EGRESS_ALLOW must be networks, such as 10.1.0.0/16: {error}.") from None


def _base_image(name: str) -> str:
    try:
        ImageSpec(base=name.format(python="3.12"))
    except (InvalidSpec, LookupError, ValueError):
        raise InvalidSetting(
            f"GPUFN_BASE_IMAGE must be an image name with {{python}} for the version, such as python:{{python}}-slim, "
            f"not {name!r}."
        ) from None
    return name


def folders(text: str) -> tuple[Folder, ...]:
    """Parse GPUFN_SANDBOX_FOLDERS. Raises InvalidSetting.

    >>> folders("/data,/scratch:rw")
    (Folder(path='/data', is_writable=False), Folder(path='/scratch', is_writable=True))
    """
    found = []
    for item in filter(None, text.split(",")):
        path = item.removesuffix(":rw")
        if not path.startswith("/"):
            raise InvalidSetting(
                f"GPUFN_SANDBOX_FOLDERS must be absolute paths, such as /data,/scratch:rw, not {item!r}."
            )
        found.append(Folder(path.rstrip("/") or "/", path != item))
    return tuple(found)
