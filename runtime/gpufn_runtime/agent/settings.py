"""What an agent is told by its environment."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from gpufn.device import Device
from gpufn.errors import InvalidSpec
from gpufn.home import Home
from gpufn_runtime.agent.devices.declared import parse_devices


@dataclass(frozen=True)
class AgentSettings:
    """GPUFN_NODE            this node's name; the host's name when not given
    GPUFN_NATS_URL        the bus, with credentials; required
    GPUFN_HOME            where state is kept; ~/.gpufn when not given
    GPUFN_DEVICES         JSON array of devices, in place of what the drivers tell
    GPUFN_TEMPLATES       standby templates kept in memory at most; 0 for none; 4 when not given
    GPUFN_STOP_GRACE_S    seconds that workers have to end when the agent stops; 10 when not given
    """

    node: str
    nats_url: str
    home: Home
    devices: tuple[Device, ...] = ()
    templates: int = 4
    stop_grace_s: float = 10.0

    @classmethod
    def from_env(cls, environ: Mapping[str, str] = os.environ) -> AgentSettings:
        """Raises InvalidSpec that names the variable."""
        if not (url := environ.get("GPUFN_NATS_URL", "")):
            raise InvalidSpec("GPUFN_NATS_URL is not set: give the bus's address, such as nats://agent:...@host:4222.")
        return cls(
            node=node_name(environ.get("GPUFN_NODE") or socket.gethostname()),
            nats_url=url,
            home=Home.from_env(environ),
            devices=parse_devices(environ["GPUFN_DEVICES"]) if environ.get("GPUFN_DEVICES") else (),
            templates=int(_number(environ, "GPUFN_TEMPLATES", 4)),
            stop_grace_s=_number(environ, "GPUFN_STOP_GRACE_S", 10.0),
        )


def node_name(text: str) -> str:
    """`text` as one token of a subject: a to z, 0 to 9 and hyphens."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:60] or "node"


def _number(environ: Mapping[str, str], name: str, default: float) -> float:
    text = environ.get(name) or str(default)
    try:
        value = float(text)
    except ValueError:
        raise InvalidSpec(f"{name} is a number, not {text!r}.") from None
    if not 0 <= value < float("inf"):
        raise InvalidSpec(f"{name} is zero or more, not {text!r}.")
    return value
