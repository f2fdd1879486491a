"""What the runner is told by its environment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from gpufn.home import Home
from gpufn.settings import InvalidSetting, bus_url, node_name
from gpufn.turns import TURNS_PER_GPU

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
        return cls(bus_url(environ), node_name(environ), Home.from_env(environ), _turns(environ))


def _turns(environ: Mapping[str, str]) -> int:
    text = environ.get("GPUFN_TURNS_PER_GPU") or str(TURNS_PER_GPU)
    if not text.isdecimal() or not 1 <= int(text) <= _MOST_TURNS:
        raise InvalidSetting(f"GPUFN_TURNS_PER_GPU={text!r} is not a whole number from 1 to {_MOST_TURNS}.")
    return int(text)
