"""Storage of teams: their volumes, queues, dicts and stored values, and the bundles, the files of models and weights,
and the engines that the revisions of their functions name. A team has each of these once.

The sizes are measured in the object stores, not declared by clients. The bodies of calls do not count: they belong to
calls, and end with them. Two deploys at the same time can exceed the limit together.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Final

from gpufn_core.domain.devices.engine import EngineManifest
from gpufn_core.domain.revision import Revision
from gpufn_core.domain.team import Team
from gpufn_core.errors import Conflict
from gpufn_core.protocol import subjects
from gpufn_core.spec.units import format_bytes
from gpufn_core.spec.volume_spec import VolumeRecord
from gpufn_gateway.auth.access import Principal
from gpufn_gateway.functions.registry import Registry
from gpufn_gateway.garbage_collection.rules import named_blobs
from gpufn_gateway.teams.data_use import DataUse
from gpufn_platform.bus.connection import Bus
from gpufn_platform.bus.storage import object_store

_STORES: Final = (subjects.BUNDLES, subjects.MODEL_FILES, subjects.ENGINE_FILES)
_LISTED: Final = 3  # number of the largest functions

Blobs = set[tuple[str, str]]  # store and digest


class StorageLimitExceeded(Conflict):
    """A deploy would exceed the storage of its team."""

    retryable = False


class TeamStorage:
    def __init__(self, bus: Bus, registry: Registry, data: DataUse) -> None:
        self._bus = bus
        self._data = data
        self._registry = registry
        self._sizes: dict[tuple[str, str], int] = {}  # of stored blobs
        self.volumes: Callable[[], Iterable[VolumeRecord]] = tuple  # of all teams

    async def used_by(self, teams: Collection[str]) -> dict[str, int]:
        """Return the bytes that the functions of each of these teams keep."""
        by_team: dict[str, Blobs] = {team: set() for team in teams}
        for function, blobs in self._blobs_by_function(teams).items():
            by_team[self._registry.teams.name_of(function)] |= blobs
        sizes = await self._sizes_of(set[tuple[str, str]]().union(*by_team.values()))
        return {
            team: _total(blobs, sizes) + self._in_volumes(team) + await self._in_data(team)
            for team, blobs in by_team.items()
        }

    def _in_volumes(self, team: str) -> int:
        """Return the bytes of the team's volumes, with their kept versions."""
        owner = self._registry.teams.name_of
        return sum(volume.stored_bytes for volume in self.volumes() if owner(volume.name) == team)

    async def _in_data(self, name: str) -> int:
        """Return the bytes of the team's queues, dicts and stored values."""
        team = self._registry.teams.get(name)
        return 0 if team is None else await self._data.of(team)

    async def admit(self, name: str, size: int) -> None:
        """Raise StorageLimitExceeded if the team of a dict or a function would keep more than it may with a value of
        this size; otherwise count it."""
        await self.admit_for(self._registry.teams.name_of(name), size)

    async def admit_for(self, name: str, size: int) -> None:
        """Like `admit`, but for a team."""
        if (team := await self._with_room(name, size)) is not None:
            self._data.add(team, size)

    async def admit_item(self, queue: str, size: int) -> None:
        """Like `admit`, but for an item of a queue."""
        if (team := await self._with_room(self._registry.teams.name_of(queue), size)) is not None:
            self._data.add_item(team, queue, size)

    async def _with_room(self, name: str, size: int) -> Team | None:
        """Return a team with a limit that has room, or None for one without a limit. Raises StorageLimitExceeded."""
        team = self._registry.teams.get(name)
        if team is None or (limit := team.limits.stored_bytes) is None:
            return None
        used = (await self.used_by((team.name,)))[team.name]
        if used + size > limit:
            counted = await self._data.of(team)
            used += await self._data.of(team, before_refusal=True) - counted
        if used + size > limit:
            raise StorageLimitExceeded(
                f"The team {team.name} may store {format_bytes(limit)}. It stores {format_bytes(used)}, and this value "
                f"adds {format_bytes(size)}: take items from queues, or delete entries of dicts. Room that was freed "
                "counts after a moment."
            )
        return team

    async def check_volume(self, volume: str, added_bytes: int) -> None:
        """Raise StorageLimitExceeded if the team of a volume would keep more than it may."""
        team = self._registry.teams.get(self._registry.teams.name_of(volume))
        if team is None or (limit := team.limits.stored_bytes) is None:
            return
        used = (await self.used_by((team.name,)))[team.name]
        if used + added_bytes > limit:
            raise StorageLimitExceeded(
                f"The team {team.name} may store {format_bytes(limit)}. It stores {format_bytes(used)}, and this "
                f"commit to {volume} adds {format_bytes(added_bytes)}: delete volumes (gpufn volume rm) or "
                "functions (gpufn rm)."
            )

    async def check(self, revision: Revision, principal: Principal) -> None:
        """Raise StorageLimitExceeded if the team of a new revision would keep more than it may. The message names only
        functions that the principal may see."""
        team = self._registry.teams.get(self._registry.teams.name_of(revision.function))
        if team is None or (limit := team.limits.stored_bytes) is None:
            return
        by_function = self._blobs_by_function((team.name,))
        before = set[tuple[str, str]]().union(*by_function.values())
        added = blobs_of([revision], {}) - before
        sizes = await self._sizes_of(before | added)
        others = self._in_volumes(team.name) + await self._in_data(team.name)
        used, after = _total(before, sizes) + others, _total(before | added, sizes) + others
        if after <= limit or after == used:
            return
        totals = {name: _total(blobs, sizes) for name, blobs in by_function.items() if principal.may_see(name)}
        largest = sorted(totals, key=lambda name: (-totals[name], name))[:_LISTED]
        listed = "".join(f", {name} {format_bytes(totals[name])}" for name in largest)
        raise StorageLimitExceeded(
            f"The functions of the team {team.name} may store {format_bytes(limit)}. They store {format_bytes(used)}"
            f"{listed}, and {format_bytes(after)} with this deploy: delete functions that the team does not need "
            "(gpufn rm)."
        )

    def _blobs_by_function(self, teams: Collection[str]) -> dict[str, Blobs]:
        registry = self._registry
        return {
            name: blobs_of(revisions.values(), registry.manifests)
            for name, revisions in registry.revisions.items()
            if registry.teams.name_of(name) in teams
        }

    async def _sizes_of(self, blobs: Blobs) -> Mapping[tuple[str, str], int]:
        """Return the sizes of blobs. A blob that the store has lost has none."""
        for store in {store for store, _ in blobs - self._sizes.keys()}:
            stored = await object_store.blobs(self._bus, store)
            others = {key: size for key, size in self._sizes.items() if key[0] != store}
            self._sizes = others | {(store, blob.digest): blob.size for blob in stored}
        return self._sizes


def blobs_of(revisions: Iterable[Revision], manifests: Mapping[str, EngineManifest]) -> Blobs:
    """Return the blobs that revisions name, with the engines among `manifests`."""
    numbered = list(revisions)
    engines = [manifests[key] for each in numbered for key in each.engine_keys if key in manifests]
    named = named_blobs(numbered, [], engines)
    return {(store, digest) for store in _STORES for digest in named[store] if digest}


def _total(blobs: Blobs, sizes: Mapping[tuple[str, str], int]) -> int:
    return sum(sizes.get(blob, 0) for blob in blobs)
