"""The queues of this runner, one per Revision with workers here. Routes calls, cancels and wakeups to their queue."""

from __future__ import annotations

from collections.abc import Mapping

from gpufn_core.domain.revision import RevisionKey
from gpufn_core.spec.priority import QueueKind
from gpufn_runtime.runner.core import events
from gpufn_runtime.runner.core.attempt import Attempt
from gpufn_runtime.runner.dispatch.fast_path import DirectDelivery
from gpufn_runtime.runner.dispatch.revision_queue import RevisionQueue


class Queues(dict[RevisionKey, RevisionQueue]):
    """Registry of the queues. `attempts` holds the attempts of all queues, by invocation."""

    def __init__(self, attempts: Mapping[str, Attempt]) -> None:
        super().__init__()
        self._attempts = attempts

    def offer(self, delivery: DirectDelivery) -> None:
        """Accept a call from the fast path."""
        queue = self.get((delivery.message.function, delivery.message.revision))
        if queue is None:
            delivery.nak()
        else:
            queue.offer(delivery)

    def withdraw(self, delivery: DirectDelivery) -> None:
        """Cancel a fast-path call: its gateway has disconnected, or has queued it."""
        queue = self.get((delivery.message.function, delivery.message.revision))
        if queue is not None:
            queue.dispatch(events.Withdrawn(delivery))

    def cancel(self, attempt: Attempt) -> None:
        """Cancel an attempt that has no caller left."""
        if (queue := self.get(attempt.worker.revision.key)) is not None:
            queue.dispatch(events.Cancelled(attempt))

    def cancel_call(self, invocation: str) -> None:
        """Cancel the invocation if it is here."""
        if (attempt := self._attempts.get(invocation)) is not None:
            self.cancel(attempt)

    def cancel_all(self, invocation_or_map: str) -> None:
        """Cancel an invocation or, for a map's id, all items of the map."""
        self.cancel_call(invocation_or_map)
        for invocation in [name for name in self._attempts if name.startswith(f"{invocation_or_map}-")]:
            self.cancel_call(invocation)

    def on_wakeup(self, function: str, kind: QueueKind) -> None:
        """Handle a wakeup: a call was queued."""
        for queue in self.values():
            if queue.revision.function == function:
                queue.credits.on_wakeup(kind)
