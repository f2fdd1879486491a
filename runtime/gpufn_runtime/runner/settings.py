"""What the runner is told by its environment."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from gpufn.home import Home

_NODE = re.compile(r"[a-z0-9-]{1,40}")


@dataclass(frozen=True)
class RunnerSettings:
    """GPUFN_NATS_URL: the bus, with credentials. GPUFN_NODE: this node's name. GPUFN_HOME: where its state is."""

    nats_url: str
    node: str
    home: Home

    @classmethod
    def from_env(cls, environ: Mapping[str, str]) -> RunnerSettings:
        """Raises ValueError that names the variable."""
        url = environ.get("GPUFN_NATS_URL", "")
        if not url:
            raise ValueError("GPUFN_NATS_URL is not set: the runner needs the address of the message bus")
        node = environ.get("GPUFN_NODE", "local")
        if _NODE.fullmatch(node) is None:
            raise ValueError(f"GPUFN_NODE={node!r} is not a node name: use a to z, 0 to 9 and hyphens")
        return cls(url, node, Home.from_env(environ))
