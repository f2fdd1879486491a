"""What the builder is told by its environment."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from gpufn.errors import InvalidSpec
from gpufn.home import Home
from gpufn.spec import parse_bytes
from gpufn_builder.exchange import THOROUGH, MeasurePlan

_NODE = re.compile(r"[a-z0-9-]{1,40}")
_SHARE = 0.75  # of the machine's memory
_LONGEST_MEASURE_S = 600


@dataclass(frozen=True)
class BuilderSettings:
    """GPUFN_NATS_URL: the bus, with credentials. GPUFN_NODE: this node's name. GPUFN_HOME: where its state is.
    GPUFN_BUILD_MEMORY: what each process that compiles may use, such as "16Gi"; three quarters of the machine's memory
    by default. GPUFN_BUILD_MEASURE: for how many seconds an engine is measured at least; 3 by default."""

    nats_url: str
    node: str
    home: Home
    memory_limit_bytes: int
    measuring: MeasurePlan

    @classmethod
    def from_env(cls, environ: Mapping[str, str]) -> BuilderSettings:
        """Raises ValueError that names the variable."""
        url = environ.get("GPUFN_NATS_URL", "")
        if not url:
            raise ValueError("GPUFN_NATS_URL is not set: the builder needs the address of the message bus")
        node = environ.get("GPUFN_NODE", "local")
        if _NODE.fullmatch(node) is None:
            raise ValueError(f"GPUFN_NODE={node!r} is not a node name: use a to z, 0 to 9 and hyphens")
        return cls(
            url,
            node,
            Home.from_env(environ),
            _memory_limit(environ.get("GPUFN_BUILD_MEMORY", "")),
            _measuring(environ.get("GPUFN_BUILD_MEASURE", "")),
        )


def _memory_limit(text: str) -> int:
    if not text:
        return int(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") * _SHARE)
    try:
        return parse_bytes(text)
    except InvalidSpec as error:
        raise ValueError(f"GPUFN_BUILD_MEMORY: {error.message}") from error


def _measuring(text: str) -> MeasurePlan:
    if not text:
        return THOROUGH
    try:
        least_s = float(text)
    except ValueError:
        least_s = -1.0
    if not 0 <= least_s <= _LONGEST_MEASURE_S:
        raise ValueError(f"GPUFN_BUILD_MEASURE={text!r} is not a number of seconds up to {_LONGEST_MEASURE_S}")
    return THOROUGH.scaled(least_s)
