"""Settings of the builder, from environment variables."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from gpufn_builder.build_job import TIMEOUT_S
from gpufn_builder.processes.process_messages import THOROUGH, MeasurePlan
from gpufn_builder.store import RETRY_FOR_S
from gpufn_core.home import Home
from gpufn_core.spec.model_spec import wrong_build_timeout
from gpufn_platform.process.settings import (
    InvalidSetting,
    bus_url,
    node_name,
    number,
    process_memory,
    size,
    whole_number,
)
from gpufn_platform.sandbox.policy import Isolation, isolation

_MEMORY_SHARE = 0.75  # share of the machine's memory
_LONGEST_MEASURE_S = 600
_MOST_BUILDS = 1000
DISK_BYTES = 64 << 30


@dataclass(frozen=True)
class BuilderSettings:
    """GPUFN_NATS_URL       URL of NATS, with credentials; required
    GPUFN_NODE           name of this node. Default: the host name
    GPUFN_HOME           the state folder. Default: ~/.gpufn
    GPUFN_BUILD_MEMORY   memory limit of each compiler process, such as 16Gi. Default: three quarters of the machine's
                         memory
    GPUFN_BUILD_DISK     disk space that a build may use, such as 32Gi. Default: 64Gi
    GPUFN_BUILDS         maximum number of builds that run at the same time, in addition to the first of each kind of
                         device. Default: half of the cores, at least 2
    GPUFN_BUILD_TIMEOUT  seconds without progress after which a build ends. Default: 600
    GPUFN_BUILD_MEASURE  minimum seconds of the measurement of an engine. Default: 3
    GPUFN_BUILD_RETRY    seconds that a build retries while NATS is unavailable or its disk is full. Default: 20
    GPUFN_ISOLATION      sandbox of build processes: auto, strict or off, as the agent's. Default: auto
    """

    nats_url: str
    node: str
    home: Home
    memory_limit_bytes: int
    disk_limit_bytes: int
    builds: int
    timeout_s: float
    measuring: MeasurePlan
    retry_for_s: float
    isolation: Isolation

    @classmethod
    def from_env(cls, environ: Mapping[str, str]) -> BuilderSettings:
        """Read the settings. Raises InvalidSetting."""
        return cls(
            bus_url(environ),
            node_name(environ),
            Home.from_env(environ),
            _memory_limit(environ.get("GPUFN_BUILD_MEMORY", "")),
            size("GPUFN_BUILD_DISK", text) if (text := environ.get("GPUFN_BUILD_DISK")) else DISK_BYTES,
            _builds(environ.get("GPUFN_BUILDS", "")),
            _timeout(environ.get("GPUFN_BUILD_TIMEOUT", "")),
            _measuring(environ.get("GPUFN_BUILD_MEASURE", "")),
            number("GPUFN_BUILD_RETRY", environ.get("GPUFN_BUILD_RETRY") or str(RETRY_FOR_S)),
            isolation(environ.get("GPUFN_ISOLATION", "")),
        )


def _memory_limit(text: str) -> int:
    if not text:
        return int(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") * _MEMORY_SHARE)
    return process_memory("GPUFN_BUILD_MEMORY", text, "a process that compiles")


def _builds(text: str) -> int:
    if not text:
        return max(2, len(os.sched_getaffinity(0)) // 2)
    return whole_number("GPUFN_BUILDS", text, 1, _MOST_BUILDS)


def _timeout(text: str) -> float:
    if not text:
        return TIMEOUT_S
    timeout_s = number("GPUFN_BUILD_TIMEOUT", text)
    if (wrong := wrong_build_timeout(timeout_s)) is not None:
        raise InvalidSetting(f"GPUFN_BUILD_TIMEOUT must be {wrong}.")
    return timeout_s


def _measuring(text: str) -> MeasurePlan:
    if not text:
        return THOROUGH
    try:
        least_s = float(text)
    except ValueError:
        least_s = -1.0
    if not 0 <= least_s <= _LONGEST_MEASURE_S:
        raise InvalidSetting(f"GPUFN_BUILD_MEASURE={text!r} is not a number of seconds up to {_LONGEST_MEASURE_S}")
    return THOROUGH.scaled(least_s)
