"""Directory of functions: which revision serves a function. Used for nested calls."""

from __future__ import annotations

import msgspec

from gpufn_core.domain.revision import Function, Revision, RevisionKey
from gpufn_core.errors import FunctionNotFound
from gpufn_core.protocol import subjects
from gpufn_core.spec.function_spec import function_name
from gpufn_platform.bus.storage.key_value import Entry, KeyValue, Watch

_function = msgspec.msgpack.Decoder(Function)
_revision = msgspec.msgpack.Decoder(Revision)


class Directory:
    """Functions are watched. Revisions never change, so each is read once, and dropped when its function changes."""

    def __init__(self, functions: KeyValue, revisions: KeyValue) -> None:
        self._functions = functions
        self._revisions = revisions
        self._serving: dict[str, int] = {}
        self._known: dict[RevisionKey, Revision] = {}
        self._watch: Watch | None = None

    async def open(self) -> None:
        self._watch = await self._functions.watch(self._on_change)

    async def serving(self, name: str) -> Revision:
        """Return the serving revision. Raises FunctionNotFound."""
        name = function_name(name)
        number = self._serving.get(name)
        if number is None:
            raise FunctionNotFound(f"there is no function {name!r}")
        return await self.revision(name, number)

    async def revision(self, function: str, number: int) -> Revision:
        known = self._known.get((function, number))
        if known is None:
            entry = await self._revisions.get(subjects.revision_key(function, number))
            if entry is None:
                raise FunctionNotFound(f"revision {function}@{number} no longer exists: deploy {function} again")
            known = self._known[function, number] = _revision.decode(entry.value)
        return known

    def _on_change(self, key: str, entry: Entry | None) -> None:
        self._known = {known: revision for known, revision in self._known.items() if known[0] != key}
        if entry is None:
            self._serving.pop(key, None)
        else:
            self._serving[key] = _function.decode(entry.value).serving
