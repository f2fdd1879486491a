"""What an agent is told by its environment."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from gpufn_core.domain.device import Device
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
    whole_number,
    yes_or_no,
)
from gpufn_runtime.agent.devices.declared import parse_devices

_MOST_TEMPLATES = 1000


@dataclass(frozen=True)
class AgentSettings:
    """GPUFN_NODE            this node's name; the host's name when not given
    GPUFN_NATS_URL        the bus, with credentials; required
    GPUFN_HOME            where state is kept; ~/.gpufn when not given
    GPUFN_DEVICES         JSON array of devices, in place of what the drivers tell
    GPUFN_MEMORY          memory of this host that workers may have, such as 64Gi; all that its kernel tells of when not
                          given, which is too little on a virtual machine that is given memory as it uses it
    GPUFN_TEMPLATES       standby templates kept in memory at most; 0 for none; 4 when not given
    GPUFN_PARK_MEMORY     memory of the host for parked workers, such as 16Gi; 0 for none; a quarter when not given
    GPUFN_GRACE           seconds that running calls may take to finish when the agent stops; 30 when not given
    GPUFN_MPS_EXCLUSIVE   yes: a GPU that is shared by MPS takes nobody else meanwhile (compute mode
                          EXCLUSIVE_PROCESS, which takes root); no when not given
    GPUFN_LAUNCHER        where a function without an image runs: process, or docker; process when not given
    GPUFN_BASE_IMAGE      the image that has a version of Python; python:{python}-slim when not given
    GPUFN_BUILD_NETWORK   Docker's network for building images; its own when not given
    GPUFN_SUPERVISOR_FIFO  a FIFO that the agent's supervisor holds open for writing: workers end with it; set by
                          `gpufn up`
    GPUFN_DOCKER_HOST     the Docker daemon; DOCKER_HOST, or unix:///var/run/docker.sock, when not given
    """

    node: str
    nats_url: str
    home: Home
    devices: tuple[Device, ...] = ()
    memory_bytes: int | None = None
    templates: int = 4
    park_bytes: int | None = None
    grace_s: float = GRACE_S
    mps_exclusive: bool = False
    default_image: ImageSpec | None = None
    base_image: str = "python:{python}-slim"
    build_network: str = ""
    docker_host: str = "unix:///var/run/docker.sock"
    supervisor_fifo: str = ""

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
                "GPUFN_TEMPLATES", environ.get("GPUFN_TEMPLATES") or str(cls.templates), 0, _MOST_TEMPLATES
            ),
            park_bytes=_size(environ, "GPUFN_PARK_MEMORY"),
            grace_s=number("GPUFN_GRACE", environ.get("GPUFN_GRACE") or str(GRACE_S)),
            mps_exclusive=yes_or_no("GPUFN_MPS_EXCLUSIVE", environ.get("GPUFN_MPS_EXCLUSIVE") or "no"),
            default_image=_default_image(environ.get("GPUFN_LAUNCHER") or "process"),
            base_image=_base_image(environ.get("GPUFN_BASE_IMAGE") or cls.base_image),
            build_network=environ.get("GPUFN_BUILD_NETWORK", ""),
            docker_host=environ.get("GPUFN_DOCKER_HOST") or environ.get("DOCKER_HOST") or cls.docker_host,
            supervisor_fifo=environ.get("GPUFN_SUPERVISOR_FIFO", ""),
        )


def _size(environ: Mapping[str, str], name: str) -> int | None:
    if not (text := environ.get(name, "")):
        return None
    return 0 if text == "0" else process_memory(name, text, "a worker")


def _default_image(launcher: str) -> ImageSpec | None:
    """With this node's own version of Python, for a pickle needs the same."""
    if launcher not in ("process", "docker"):
        raise InvalidSetting(f"GPUFN_LAUNCHER is process or docker, not {launcher!r}.")
    return ImageSpec(python="{}.{}".format(*sys.version_info)) if launcher == "docker" else None


def _base_image(name: str) -> str:
    try:
        ImageSpec(base=name.format(python="3.12"))
    except (InvalidSpec, LookupError, ValueError):
        raise InvalidSetting(
            f"GPUFN_BASE_IMAGE is an image's name with {{python}} for the version, such as python:{{python}}-slim, "
            f"not {name!r}."
        ) from None
    return name
