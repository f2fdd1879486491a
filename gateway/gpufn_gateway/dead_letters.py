"""Calls that failed for good: to be looked at, run again as new calls, or dropped."""

from __future__ import annotations

import contextlib
from typing import Any

import msgspec

from gpufn.bus import dead_letters, records
from gpufn.bus.connection import Bus
from gpufn.clock import Clock
from gpufn.errors import DeadLetterNotFound, FunctionNotFound
from gpufn.ids import invocation_id_for, names_invocation
from gpufn.protocol.records import CallRecord, DeadLetter, Webhook
from gpufn_gateway import call_views
from gpufn_gateway.registry import Registry

MOST_AT_ONCE = 1000


class Replayed(msgspec.Struct, frozen=True):
    """A dead letter, and the call that was made of it."""

    letter: str
    invocation: str


class DeadLetters:
    def __init__(self, bus: Bus, registry: Registry, clock: Clock) -> None:
        self._bus = bus
        self._registry = registry
        self._clock = clock

    async def recent(self, function: str, limit: int) -> list[dict[str, Any]]:
        """Of one function, or of all (``*``); newest first. Raises FunctionNotFound."""
        found = await dead_letters.recent(self._bus, function, limit)
        if not found and function != "*":
            self._registry.function(function)
        return [call_views.letter(letter) for letter in found]

    async def read(self, function: str, invocation: str) -> tuple[DeadLetter, bytes]:
        """The letter and its payload. Raises DeadLetterNotFound."""
        found = await dead_letters.read(self._bus, function, invocation) if names_invocation(invocation) else None
        if found is None:
            raise DeadLetterNotFound
        return found

    async def replay(self, function: str, invocation: str, owner: str) -> CallRecord:
        """Submit it again, in its class, to the revision that serves now, and drop the letter; a repeat meets the same
        new call. `owner` is the id of the API key that asks."""
        letter, payload = await self.read(function, invocation)
        target = self._registry.resolve(f"{function}.{letter.method}" if letter.method else function)
        record = await records.submit(
            self._bus,
            target.revision,
            letter.method,
            letter.content_type,
            payload,
            invocation=invocation_id_for(function, "dead letter", f"{letter.id} {letter.died_at}"),
            accept=letter.accept,
            deadline=0.0,
            now=self._clock.time(),
            priority=letter.priority,
            owner=owner,
            webhook=self._webhook(letter),
        )
        await dead_letters.drop(self._bus, function, invocation)
        return record

    def _webhook(self, letter: DeadLetter) -> Webhook | None:
        """The call's own. None for its function's, which may be another one by now."""
        revision = self._registry.revisions.get(letter.function, {}).get(letter.revision)
        is_functions = revision is not None and letter.webhook == Webhook(revision.spec.webhook or "")
        return None if is_functions else letter.webhook

    async def replay_all(self, function: str, owner: str) -> list[Replayed]:
        """The oldest first; of very many, the newest thousand. Those of a method that is gone stay. Raises
        FunctionNotFound."""
        self._registry.function(function)
        replayed = []
        for letter in reversed(await dead_letters.recent(self._bus, function, MOST_AT_ONCE)):
            # Somebody else has taken it meanwhile; nobody can call it.
            with contextlib.suppress(DeadLetterNotFound, FunctionNotFound):
                replayed.append(Replayed(letter.id, (await self.replay(function, letter.id, owner)).id))
        return replayed

    async def drop(self, function: str, invocation: str) -> None:
        """Raises DeadLetterNotFound."""
        if not names_invocation(invocation) or not await dead_letters.drop(self._bus, function, invocation):
            raise DeadLetterNotFound

    async def drop_all(self, function: str) -> int:
        """Raises FunctionNotFound."""
        dropped = await dead_letters.drop(self._bus, function)
        if not dropped:  # those of a deleted function are dropped as well
            self._registry.function(function)
        return dropped
