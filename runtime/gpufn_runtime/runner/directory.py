"""Directory of functions, for nested calls: which revision a call of a function runs, and which functions may call
it."""

from __future__ import annotations

import contextlib

import msgspec

from gpufn_core.domain.revision import Function, Revision, RevisionKey
from gpufn_core.domain.team import Team, Teams
from gpufn_core.domain.traffic import Split, choose
from gpufn_core.errors import FunctionNotFound
from gpufn_core.protocol import subjects
from gpufn_core.spec.naming.names import Names, home_of
from gpufn_core.spec.naming.variant_names import split
from gpufn_platform.bus.storage.key_value import Entry, KeyValue, Watch
from gpufn_runtime.runner.variants import Variants

_function = msgspec.msgpack.Decoder(Function)
_revision = msgspec.msgpack.Decoder(Revision)
_team = msgspec.msgpack.Decoder(Team)


class Directory:
    """Functions and teams are watched. Revisions never change, so each is read once, and dropped when its function
    changes."""

    def __init__(self, functions: KeyValue, revisions: KeyValue, teams: KeyValue, variants: Variants) -> None:
        self._functions = functions
        self._revisions = revisions
        self._team_records = teams
        self._variants = variants
        self._teams = Teams()
        self._serving: dict[str, int] = {}
        self._splits: dict[str, Split] = {}  # only of split functions
        self._names = Names()
        self._known: dict[RevisionKey, Revision] = {}
        self._watches: list[Watch] = []

    async def open(self) -> None:
        self._watches.append(await self._team_records.watch(self._on_team))
        self._watches.append(await self._functions.watch(self._on_change))

    def find(self, name: str, caller: str) -> str:
        """Return the full name of the function that `name` denotes for the function `caller`: functions of its own app
        come first. Raises FunctionNotFound, AmbiguousFunction."""
        return self._names.find(name, home_of(caller), lambda full: self._teams.may_call(caller, full))

    def may_call(self, caller: str, function: str) -> bool:
        """Return whether the function `caller` may call another function and know its calls."""
        return self._teams.may_call(caller, function)

    def is_split(self, function: str) -> bool:
        """Return whether the calls of a function, by its full name, are divided between revisions."""
        return function in self._splits

    def team_of(self, function: str) -> Team | None:
        """Return the team that owns a function, by its full name."""
        return self._teams.of(function)

    async def called(self, name: str, caller: str, key: bytes) -> Revision:
        """Return the revision for a call with `key` of the function, or the variant, that `name` means to `caller`.
        Raises FunctionNotFound, AmbiguousFunction, and the errors of `Variants.find`."""
        function, selector, _ = split(name)
        full = self.find(function, caller)
        if selector is None:
            if (traffic := self._splits.get(full)) is not None:
                with contextlib.suppress(FunctionNotFound):  # the record of the chosen revision was deleted
                    revision = await self.revision(full, choose(traffic, full.encode() + key))
                    if not revision.is_checked_first:
                        return revision
                    del self._known[revision.key]  # its check will end
            return await self.revision(full, self._serving[full])
        variant = await self._variants.find(full, selector, caller)
        return await self.revision(variant.name, self._serving.get(variant.name, variant.revision))

    async def revision(self, function: str, number: int) -> Revision:
        known = self._known.get((function, number))
        if known is None:
            entry = await self._revisions.get(subjects.revision_key(function, number))
            if entry is None:
                raise FunctionNotFound(f"revision {function}@{number} no longer exists: deploy {function} again")
            known = self._known[function, number] = _revision.decode(entry.value)
        return known

    def _on_team(self, name: str, entry: Entry | None) -> None:
        if entry is None:
            self._teams.remove(name)
        else:
            self._teams.put(_team.decode(entry.value))

    def _on_change(self, key: str, entry: Entry | None) -> None:
        self._known = {known: revision for known, revision in self._known.items() if known[0] != key}
        if entry is None:
            self._serving.pop(key, None)
            self._splits.pop(key, None)
            self._names.discard(key)
        else:
            function = _function.decode(entry.value)
            self._names.add(key, is_temporary=function.lease is not None)
            self._serving[key] = function.serving
            if function.traffic is None:
                self._splits.pop(key, None)
            else:
                self._splits[key] = function.traffic
