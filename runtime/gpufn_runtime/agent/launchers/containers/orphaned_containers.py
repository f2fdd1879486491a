"""Containers that are nobody's are removed, whatever made them: those of an earlier agent, of workers that have ended,
and what a failure left."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Set
from typing import Protocol

from gpufn_core.errors import PlatformError
from gpufn_runtime.agent.launchers.base import DaemonAway

log = logging.getLogger(__name__)


class Remover(Protocol):
    """What is asked of `docker.Docker`."""

    async def remove(self, container: str) -> None: ...


class Strays:
    """`in_use` are the containers that have workers, by id, as all here are."""

    def __init__(self, daemon: Remover) -> None:
        self._daemon = daemon
        self.in_use: set[str] = set()
        self._ended: set[str] = set()  # and not removed yet
        self._not_removed: set[str] = set()  # though it was tried

    def let_go(self, container: str) -> None:
        """Its worker is gone."""
        self.in_use.discard(container)
        self._ended.add(container)

    async def remove(self, found: Set[str], spared: Set[str]) -> None:
        """Of those that the daemon has `found`, all but the `spared` ones and those in use. Raises DaemonAway."""
        nobodys = found - self.in_use - spared
        for container in sorted(nobodys, key=self._not_removed.__contains__):
            if container not in self._ended | self._not_removed:
                log.info("container %s is nobody's and is removed", container[:12])
            await self._remove(container)
        self._ended &= found
        self._not_removed &= found

    async def remove_ended(self) -> None:
        """As far as that goes: what stays is another agent's to remove."""
        await asyncio.gather(*map(self._daemon.remove, self._ended), return_exceptions=True)

    async def _remove(self, container: str) -> None:
        """One that is stuck is tried again the next time, after the others. Raises DaemonAway."""
        try:
            await self._daemon.remove(container)
        except DaemonAway:
            self._not_removed.add(container)
            raise
        except PlatformError as error:
            if container not in self._not_removed:
                log.warning("container %s is not removed: %s", container[:12], error.message)
                self._not_removed.add(container)
