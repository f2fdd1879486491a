"""The queues of this runner, one for each Revision that has workers here: what concerns a call finds its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from gpufn_core.domain.revision import RevisionKey
from gpufn_core.spec.priority import QueueKind
from gpufn_runtime.runner.attempts.attempt import Attempt
from gpufn_runtime.runner.dispatch.fast_path import DirectDelivery
from gpufn_runtime.runner.dispatch.revision_queue import RevisionQueue


class Queues:
    """`attempts` are those of all of them, by invocation."""

    def __init__(self, attempts: Mapping[str, Attempt]) -> None:
        self._attempts = attempts
        self._queues: dict[RevisionKey, RevisionQueue] = {}

    def __iter__(self) -> Iterator[RevisionQueue]:
        """Those of now: some may go meanwhile."""
        return iter(list(self._queues.values()))

    def get(self, key: RevisionKey) -> RevisionQueue | None:
        return self._queues.get(key)

    def add(self, queue: RevisionQueue) -> None:
        self._queues[queue.revision.key] = queue

    def remove(self, queue: RevisionQueue) -> None:
        del self._queues[queue.revision.key]

    # --- of a call ----------------------------------------------------------------------------------------------------

    def offer(self, delivery: DirectDelivery) -> None:
        """It came by the lane."""
        queue = self._queues.get((delivery.message.function, delivery.message.revision))
        if queue is None:
            delivery.nak()
        else:
            queue.offer(delivery)

    def withdraw(self, delivery: DirectDelivery) -> None:
        """Whoever had offered it is gone, or has queued it."""
        queue = self._queues.get((delivery.message.function, delivery.message.revision))
        if queue is not None:
            queue.withdraw(delivery)

    def cancel(self, attempt: Attempt) -> None:
        """Whoever wanted it is gone."""
        if (queue := self._queues.get(attempt.link.revision.key)) is not None:
            queue.cancel(attempt)

    def cancel_call(self, invocation: str) -> None:
        """If it is here."""
        if (attempt := self._attempts.get(invocation)) is not None:
            self.cancel(attempt)

    def cancel_all(self, wanted: str) -> None:
        """A call or, of a map, all items."""
        self.cancel_call(wanted)
        for invocation in [each for each in self._attempts if each.startswith(f"{wanted}-")]:
            self.cancel_call(invocation)

    def on_doorbell(self, function: str, rung: QueueKind) -> None:
        """A call was queued there."""
        for queue in self._queues.values():
            if queue.revision.function == function:
                queue.on_doorbell(rung)
