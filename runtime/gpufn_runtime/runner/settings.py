"""What the runner is told by its environment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from gpufn_core.domain.gpu_fair_queue import TURNS_PER_GPU
from gpufn_core.home import Home
from gpufn_platform.process.settings import bus_url, node_name, whole_number

_MOST_TURNS: Final = 48


@dataclass(frozen=True)
class RunnerSettings:
    """GPUFN_NATS_URL: the bus, with credentials. GPUFN_NODE: this node's name; the host's by default. GPUFN_HOME:
    where its state is. GPUFN_TURNS_PER_GPU: so many workers may use a GPU that is shared by time at once, when those of
    more than one function are there; 2 when not given."""

    nats_url: str
    node: str
    home: Home
    turns_per_gpu: int = TURNS_PER_GPU

    @classmethod
    def from_env(cls, environ: Mapping[str, str]) -> RunnerSettings:
        """Raises InvalidSetting."""
        turns = environ.get("GPUFN_TURNS_PER_GPU") or str(cls.turns_per_gpu)
        return cls(
            bus_url(environ),
            node_name(environ),
            Home.from_env(environ),
            whole_number("GPUFN_TURNS_PER_GPU", turns, 1, _MOST_TURNS),
        )
