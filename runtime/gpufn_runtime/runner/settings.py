"""Settings of the runner, from environment variables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from gpufn_core.domain.devices.gpu_fair_queue import TURNS_PER_GPU
from gpufn_core.home import Home
from gpufn_platform.process.settings import bus_url, node_name, volume_store_address, whole_number

_MAX_TURNS: Final = 48


@dataclass(frozen=True)
class RunnerSettings:
    """GPUFN_NATS_URL: URL of the NATS server, with credentials. GPUFN_NODE: this node's name. Default: the host name.
    GPUFN_HOME: folder for state. GPUFN_TURNS_PER_GPU: workers that may use a time-shared GPU at once while several
    functions share it. Default: 2. GPUFN_VOLUME_STORE: files of volumes: s3://bucket/folder, as the gateway's setting.
    Default: the bus."""

    nats_url: str
    node: str
    home: Home
    turns_per_gpu: int = TURNS_PER_GPU
    volume_store: str = ""

    @classmethod
    def from_env(cls, environ: Mapping[str, str]) -> RunnerSettings:
        """Raises InvalidSetting."""
        turns = environ.get("GPUFN_TURNS_PER_GPU") or str(cls.turns_per_gpu)
        return cls(
            bus_url(environ),
            node_name(environ),
            Home.from_env(environ),
            whole_number("GPUFN_TURNS_PER_GPU", turns, 1, _MAX_TURNS),
            volume_store_address(environ),
        )
