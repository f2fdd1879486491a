"""Calls that failed for good: to be looked at, run again as new calls, or dropped."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

import msgspec

from gpufn_core.encoding import media
from gpufn_core.errors import CapacityError, DeadLetterNotFound, Forbidden, FunctionNotFound, UnsupportedMediaType
from gpufn_core.ids import invocation_id_for, names_invocation
from gpufn_core.protocol import subjects
from gpufn_core.protocol.limits import DEAD_LETTERS_AT_ONCE
from gpufn_core.protocol.records import BodyReference, CallRecord, DeadLetter, Webhook
from gpufn_gateway.auth.access import Principal
from gpufn_gateway.calls.prepare import Calls, check_pickles
from gpufn_gateway.submitted import call_views
from gpufn_platform.bus.connection import Bus
from gpufn_platform.queue import call_records, dead_letters, large_bodies
from gpufn_platform.queue.call_request import CallRequest


class Replayed(msgspec.Struct, frozen=True):
    """A dead letter, and the call that was made of it."""

    letter: str
    invocation: str


class DeadLetters:
    def __init__(self, bus: Bus, calls: Calls) -> None:
        self._bus = bus
        self._calls = calls
        self._registry = calls.registry

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

    async def replay(
        self, function: str, invocation: str, principal: Principal, *, is_counted: bool = True
    ) -> CallRecord:
        """Submit it again, in its class, to the revision that serves now, and drop the letter; a repeat meets the same
        new call. It is one of `principal`'s calls, and counts against the rate of its key unless it is one of many.
        Raises Forbidden, Limited, QueueFull."""
        letter, payload = await self.read(function, invocation)
        target = self._registry.resolve(f"{function}.{letter.method}" if letter.method else function)
        if letter.content_type == media.PICKLED:
            check_pickles(target, principal)
        again = invocation_id_for(function, "dead letter", f"{letter.id} {letter.died_at}")
        async with self._calls.making(principal, target, letter.priority, is_counted=is_counted):
            reference = letter.reference
            if reference is not None:  # the letter's goes with the letter
                reference = await large_bodies.copy_arguments(self._bus, reference, again)
            record = await call_records.submit(
                self._bus,
                CallRequest(
                    target.revision,
                    letter.method,
                    letter.content_type,
                    payload,
                    letter.accept,
                    deadline=0.0,
                    priority=letter.priority,
                    owner=principal.owner,
                    reference=reference,
                ),
                now=self._calls.clock.time(),
                invocation=again,
                webhook=self._webhook(letter),
            )
        await self._drop(letter)
        return record

    async def _drop(self, letter: DeadLetter) -> int:
        """The letter, and its payload; returns how many there were."""
        dropped = await dead_letters.drop(self._bus, letter.function, letter.id)
        if letter.reference is not None:
            await large_bodies.remove(self._bus, subjects.ARGUMENT_FILES, letter.reference)
        return dropped

    def payload_parts(self, reference: BodyReference) -> AsyncGenerator[bytes, None]:
        """A payload that is too large to be beside its letter. Raises ArtifactUnavailable."""
        return large_bodies.read(self._bus, subjects.ARGUMENT_FILES, reference)

    def _webhook(self, letter: DeadLetter) -> Webhook | None:
        """The call's own. None for its function's, which may be another one by now."""
        revision = self._registry.revisions.get(letter.function, {}).get(letter.revision)
        is_functions = revision is not None and letter.webhook == Webhook(revision.spec.webhook or "")
        return None if is_functions else letter.webhook

    async def replay_all(self, function: str, principal: Principal) -> list[Replayed]:
        """The oldest first; of very many, the newest thousand, or as many as there is room for. Those of a method that
        is gone stay, and those of a class that is not for `principal`. Against the rate of its key it counts as one
        call. Raises FunctionNotFound; Limited and QueueFull when there is no room for any."""
        self._registry.function(function)
        replayed: list[Replayed] = []
        for letter in reversed(await dead_letters.recent(self._bus, function, DEAD_LETTERS_AT_ONCE)):
            try:
                call = await self.replay(function, letter.id, principal, is_counted=not replayed)
            except (DeadLetterNotFound, FunctionNotFound, Forbidden, UnsupportedMediaType):
                continue  # somebody else has taken it; nobody can call it; nor who asks, in its class
            except CapacityError:
                if not replayed:
                    raise
                break
            replayed.append(Replayed(letter.id, call.id))
        return replayed

    async def drop(self, function: str, invocation: str) -> None:
        """Raises DeadLetterNotFound."""
        letter, _ = await self.read(function, invocation)
        if not await self._drop(letter):
            raise DeadLetterNotFound

    async def drop_all(self, function: str) -> int:
        """Their large payloads are collected later. Raises FunctionNotFound."""
        dropped = await dead_letters.drop(self._bus, function)
        if not dropped:  # those of a deleted function are dropped as well
            self._registry.function(function)
        return dropped
