"""What the runner is told by its environment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gpufn.home import Home
from gpufn.settings import bus_url, node_name


@dataclass(frozen=True)
class RunnerSettings:
    """GPUFN_NATS_URL: the bus, with credentials. GPUFN_NODE: this node's name; the host's by default. GPUFN_HOME:
    where its state is."""

    nats_url: str
    node: str
    home: Home

    @classmethod
    def from_env(cls, environ: Mapping[str, str]) -> RunnerSettings:
        """Raises InvalidSetting."""
        return cls(bus_url(environ), node_name(environ), Home.from_env(environ))
