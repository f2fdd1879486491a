"""Removal of orphaned containers: left by an earlier agent, by a worker that ended, or by a failure."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Set
from typing import Protocol

from gpufn_core.errors import PlatformError
from gpufn_runtime.agent.launchers.base import DaemonUnavailable

log = logging.getLogger(__name__)


class Remover(Protocol):
    """The part of the Docker client that is needed here."""

    async def remove(self, container: str) -> None: ...


class OrphanedContainers:
    """Removes orphaned containers, by id. `in_use` are the containers that have workers."""

    def __init__(self, daemon: Remover) -> None:
        self._daemon = daemon
        self.in_use: set[str] = set()
        self._ended: set[str] = set()  # not removed yet
        self._failed_removals: set[str] = set()

    def release(self, container: str) -> None:
        """Release the container of a worker that has ended."""
        self.in_use.discard(container)
        self._ended.add(container)

    async def remove(self, existing: Set[str], kept: Set[str]) -> None:
        """Remove the `existing` containers that are neither `kept` nor in use. Raises DaemonUnavailable."""
        orphans = existing - self.in_use - kept
        for container in sorted(orphans, key=self._failed_removals.__contains__):
            if container not in self._ended | self._failed_removals:
                log.info("removing orphaned container %s", container[:12])
            await self._remove(container)
        self._ended &= existing
        self._failed_removals &= existing

    async def remove_ended(self) -> None:
        """Remove the containers of ended workers, ignoring errors: a later agent removes the rest."""
        await asyncio.gather(*map(self._daemon.remove, self._ended), return_exceptions=True)

    async def _remove(self, container: str) -> None:
        """Remove one container. A failed removal is retried later, after the other ones. Raises DaemonUnavailable."""
        try:
            await self._daemon.remove(container)
        except DaemonUnavailable:
            self._failed_removals.add(container)
            raise
        except PlatformError as error:
            if container not in self._failed_removals:
                log.warning("cannot remove container %s: %s", container[:12], error.message)
                self._failed_removals.add(container)
