"""The Docker network of this node's containers with `network="egress"`: a bridge with the rules of `rules`.

The rules are there before the network. Where the agent cannot set them, containers get Docker's default bridge, from
which they reach private networks too: `trouble` tells why.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import socket
import subprocess
from collections.abc import Iterable, Mapping
from typing import Final, Protocol

from gpufn_core.home import Home
from gpufn_runtime.agent.egress import availability, rules
from gpufn_runtime.agent.egress.commands import reason, run, succeeds
from gpufn_runtime.agent.egress.rules import Network, Policy

log = logging.getLogger(__name__)

DEFAULT: Final = "bridge"  # Docker's own


class NetworkDaemon(Protocol):
    """The part of the Docker client that the network needs."""

    async def ensure_network(self, name: str, options: Mapping[str, str], labels: Mapping[str, str]) -> None: ...
    async def remove_network(self, name: str) -> bool: ...


class ContainerNetwork:
    def __init__(
        self,
        daemon: NetworkDaemon,
        home: Home,
        allowed: Iterable[Network] = (),
        *,
        owner: Mapping[str, str],
        trouble: str,
    ) -> None:
        name = hashlib.sha256(os.fsencode(home.root)).hexdigest()
        self._daemon = daemon
        self._name = f"gpufn-{name[:12]}-egress"
        self._interface = f"gpfd-{name[:8]}"  # 15 characters at most
        self._allowed = tuple(allowed)
        self._owner = owner
        self._lock = asyncio.Lock()
        self._is_ready = False
        self.trouble = trouble

    @property
    def has_child_processes(self) -> bool:
        """Return whether a command runs whose process only its caller may reap."""
        return self._lock.locked()

    async def ready(self) -> str:
        """Return the name of the network, which is made if necessary. Raises PlatformError if Docker cannot."""
        async with self._lock:
            if not (self._is_ready or self.trouble):
                await self._set_up()
            return DEFAULT if self.trouble else self._name

    def forget(self) -> None:
        """Make the network again for the next container: Docker was restarted, or the network was removed."""
        self._is_ready = False

    async def remove(self) -> None:
        """Remove the network and its rules, unless containers still use it."""
        async with self._lock:
            if self._has_interface():
                await self._remove()

    async def _remove(self) -> None:
        if await self._daemon.remove_network(self._name):
            self._is_ready = False
            await asyncio.to_thread(succeeds, "nft", "delete", "table", "inet", self._interface)

    async def _set_up(self) -> None:
        policy = Policy(self._allowed, availability.current_dns().servers)
        try:
            ruleset = rules.of_node(self._interface, policy)
            await asyncio.to_thread(run, "nft", "--file", "-", given=ruleset)
        except (OSError, subprocess.SubprocessError) as error:
            self._give_up(reason(error))
            return
        options = {
            "com.docker.network.bridge.name": self._interface,
            "com.docker.network.bridge.enable_icc": "false",
        }
        await self._daemon.ensure_network(self._name, options, self._owner)
        if self._has_interface():
            self._is_ready = True
            return
        await self._remove()
        self._give_up("the Docker daemon is not in the agent's network namespace")

    def _has_interface(self) -> bool:
        return any(name == self._interface for _, name in socket.if_nameindex())

    def _give_up(self, why: str) -> None:
        self.trouble = why
        log.warning("containers with network='egress' reach private networks: %s", why)
