"""Dead letters: calls that failed for good. They can be listed, replayed as new calls, or dropped."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from typing import Any

import msgspec

from gpufn_core.encoding import media
from gpufn_core.errors import CapacityError, DeadLetterNotFound, Forbidden, FunctionNotFound, UnsupportedMediaType
from gpufn_core.ids import invocation_id_for, is_call_or_item_id
from gpufn_core.protocol import subjects
from gpufn_core.protocol.limits import DEAD_LETTERS_AT_ONCE
from gpufn_core.protocol.records import BodyReference, CallRecord, DeadLetter, Webhook
from gpufn_gateway.auth.access import Principal
from gpufn_gateway.calls.prepare import Calls, check_pickles
from gpufn_gateway.submitted import call_views
from gpufn_platform.bus.connection import Bus
from gpufn_platform.queue import large_bodies
from gpufn_platform.queue.call_request import CallRequest
from gpufn_platform.queue.records import call_records, dead_letters


class Replayed(msgspec.Struct, frozen=True):
    """The id of a dead letter and of the new call that replays it."""

    letter: str
    invocation: str


class DeadLetters:
    def __init__(self, bus: Bus, calls: Calls) -> None:
        self._bus = bus
        self._calls = calls
        self._registry = calls.registry

    async def recent(
        self, function: str, limit: int, is_listed: Callable[[str], bool] = lambda function: True
    ) -> list[dict[str, Any]]:
        """List the letters of one function or of all listed ones (``*``), newest first. Raises FunctionNotFound."""
        letters = await dead_letters.recent(
            self._bus, function, limit, matches=lambda letter: is_listed(letter.function)
        )
        if not letters and function != "*":
            self._registry.function(function)
        return [call_views.letter(letter) for letter in letters]

    async def read(self, function: str, invocation: str) -> tuple[DeadLetter, bytes]:
        """Return a letter and its payload. Raises DeadLetterNotFound."""
        entry = await dead_letters.read(self._bus, function, invocation) if is_call_or_item_id(invocation) else None
        if entry is None:
            raise DeadLetterNotFound
        return entry

    async def replay(
        self, function: str, invocation: str, principal: Principal, *, is_counted: bool = True
    ) -> CallRecord:
        """Submit the call again with its priority to the revision for new calls, and drop the letter.

        A repeated replay returns the same new call. The call belongs to `principal`. It counts against the rate of the
        key if `is_counted`. Raises Forbidden, KeyLimitExceeded, QueueFull.
        """
        letter, payload = await self.read(function, invocation)
        new_id = invocation_id_for(function, "dead letter", f"{letter.id} {letter.died_at}")
        target = self._registry.target(function, letter.method).of(new_id)
        await self._calls.variants.hold(function)
        if letter.content_type == media.PICKLED:
            check_pickles(target, principal)
        async with self._calls.admitting(principal, target, letter.priority, is_counted=is_counted):
            reference = letter.reference
            if reference is not None:  # the original is removed together with the letter
                reference = await large_bodies.copy_arguments(self._bus, reference, new_id)
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
                    trace="" if self._calls.tracing is None else self._calls.tracing.begin(),
                    reference=reference,
                ),
                now=self._calls.clock.time(),
                invocation=new_id,
                webhook=self._webhook(letter),
            )
        await self._drop(letter)
        return record

    async def _drop(self, letter: DeadLetter) -> int:
        """Drop a letter and its payload. Return the number of dropped letters."""
        dropped = await dead_letters.drop(self._bus, letter.function, letter.id)
        if letter.reference is not None:
            await large_bodies.remove(self._bus, subjects.ARGUMENT_FILES, letter.reference)
        return dropped

    def payload_parts(self, reference: BodyReference) -> AsyncGenerator[bytes, None]:
        """Read a payload that is stored outside its letter. Raises ArtifactUnavailable."""
        return large_bodies.read(self._bus, subjects.ARGUMENT_FILES, reference)

    def _webhook(self, letter: DeadLetter) -> Webhook | None:
        """Return the webhook if the call set it. None if it came from the function, whose webhook may have changed."""
        revision = self._registry.revisions.get(letter.function, {}).get(letter.revision)
        is_default = revision is not None and letter.webhook == Webhook(revision.spec.webhook or "")
        return None if is_default else letter.webhook

    async def replay_all(self, function: str, principal: Principal) -> list[Replayed]:
        """Replay the letters of a function, oldest first: at most the newest thousand, or as many as the queue takes.

        Letters stay if their method no longer exists or `principal` may not use their priority. All together count as
        one call against the rate. Raises FunctionNotFound; KeyLimitExceeded and QueueFull if not even one was replayed.
        """
        self._registry.function(function)
        replayed: list[Replayed] = []
        for letter in reversed(await dead_letters.recent(self._bus, function, DEAD_LETTERS_AT_ONCE)):
            try:
                call = await self.replay(function, letter.id, principal, is_counted=not replayed)
            except (DeadLetterNotFound, FunctionNotFound, Forbidden, UnsupportedMediaType):
                continue  # replayed by another client, its method no longer exists, or `principal` may not call it
            except CapacityError:
                if not replayed:
                    raise
                break
            replayed.append(Replayed(letter.id, call.id))
        return replayed

    async def drop(self, function: str, invocation: str) -> None:
        """Drop one letter. Raises DeadLetterNotFound."""
        letter, _ = await self.read(function, invocation)
        if not await self._drop(letter):
            raise DeadLetterNotFound

    async def drop_all(self, function: str) -> int:
        """Drop all letters of a function; return how many. Garbage collection removes their large payloads.

        Raises FunctionNotFound.
        """
        dropped = await dead_letters.drop(self._bus, function)
        if not dropped:  # checked afterwards, so that the letters of a deleted function can be dropped
            self._registry.function(function)
        return dropped
