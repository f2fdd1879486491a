"""Take webhook jobs from their queue and settle each of them. Every gateway runs this and shares the queue.

A job is the id of a call. It is stored before the call's end, so it may arrive first and then waits for the end. Jobs
in flight are touched. After a gateway dies, its jobs are redelivered after `ack_wait`: receivers recognize a repeat by
its webhook-id.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple
from urllib.parse import urlsplit

from gpufn.webhooks import signatures
from gpufn_core.domain.trace_context import traceparent, tracestate
from gpufn_core.errors import GpufnError, InvocationNotFound
from gpufn_core.protocol import subjects
from gpufn_core.protocol.codec import encode
from gpufn_core.protocol.messages import LogLine
from gpufn_core.protocol.records import CallRecord, Webhook
from gpufn_gateway.metrics.telemetry import Telemetry
from gpufn_gateway.webhooks import retry_policy
from gpufn_gateway.webhooks.concurrency import Receivers
from gpufn_gateway.webhooks.payload import EncodePayload, Payload, encode_payload
from gpufn_gateway.webhooks.retry_policy import Verdict
from gpufn_gateway.webhooks.secrets import WebhookSecrets
from gpufn_gateway.webhooks.sender import AddressRefused, ReceiverUnreachable, WebhookSender
from gpufn_platform.bus.connection import Bus
from gpufn_platform.bus.storage import streams
from gpufn_platform.process.clock import Clock
from gpufn_platform.process.tasks import Tasks
from gpufn_platform.queue.delivery import Delivery
from gpufn_platform.queue.puller import Pull
from gpufn_platform.queue.records import call_records

log = logging.getLogger(__name__)

_AT_ONCE: Final = 64
_TICK_S: Final = 1.0  # interval at which jobs in flight are touched
_ACK_WAIT_S: Final = 8.0
_UNBOUNDED: Final = -1  # jobs that wait for their next attempt count as pending too
_RECORD_WAIT_S: Final = 10.0  # for a call's end, which is stored right after the job


class Deliveries:
    """`payloads` write the webhooks of other protocols, by `Webhook.form`. `team_of` returns the team of a function."""

    def __init__(
        self,
        bus: Bus,
        secrets: WebhookSecrets,
        sender: WebhookSender,
        clock: Clock,
        telemetry: Telemetry,
        *,
        payloads: Mapping[str, EncodePayload] | None = None,
        team_of: Callable[[str], str] = str,
    ) -> None:
        self._bus = bus
        self._secrets = secrets
        self._sender = sender
        self._clock = clock
        self._telemetry = telemetry
        self._payloads = payloads or {}
        self._tasks = Tasks("webhook")
        self._in_flight: set[Delivery] = set()
        self._receivers = Receivers()
        self._team_of = team_of
        self._teams = Receivers(_AT_ONCE // 2)

    async def run(self) -> None:
        """Run until cancelled; jobs in flight are then redelivered, here or elsewhere."""
        pull = Pull(self._bus, subjects.WEBHOOKS, subjects.WEBHOOK_CONSUMER, self._take, on_missing=self._on_missing)
        self._pull = pull
        pull.grant(_AT_ONCE)
        try:
            while True:
                pull.tick(self._clock.monotonic())
                with contextlib.suppress(GpufnError):  # without the bus no other gateway gets it either
                    for delivery in self._in_flight:
                        delivery.touch()
                await asyncio.sleep(_TICK_S)
        finally:
            pull.withdraw()
            await self._tasks.end()
            await self._sender.close()

    def _take(self, delivery: Delivery) -> None:
        self._tasks.start(self._settle(delivery))

    async def _settle(self, delivery: Delivery) -> None:
        self._in_flight.add(delivery)
        retry_after_s: float | None = 0.0  # on cancellation: another gateway receives it at once
        try:
            failure = await self._deliver(delivery)
            if failure is None:
                self._telemetry.of(_function(delivery)).count_webhook("delivered")
            retry_after_s = None if failure is None else self._retry_after_s(delivery, failure)
        except _Postponed as later:
            retry_after_s = later.after_s
        except GpufnError as error:
            log.warning("the webhook of %s is delayed: %s", delivery.payload.decode(), error)
            retry_after_s = _TICK_S
        except Exception:
            log.exception("the webhook of %s failed", delivery.payload.decode())
            retry_after_s = self._retry_after_s(delivery, _Failure("the gateway failed to send it"))
        finally:
            self._in_flight.discard(delivery)
            with contextlib.suppress(GpufnError):  # without the bus it is redelivered anyway
                if retry_after_s is None:
                    delivery.ack()
                else:
                    delivery.nak(retry_after_s)
            self._pull.grant(1)

    async def _deliver(self, delivery: Delivery) -> _Failure | None:
        """Make one attempt. Raises _Postponed if its receiver has too many in flight."""
        try:
            record, result = await call_records.wait(self._bus, delivery.payload.decode(), _RECORD_WAIT_S)
        except InvocationNotFound:
            return _Failure("the call's record has expired")
        if not record.state.ended:
            return _Failure("the call has not ended")
        if record.webhook is None:
            return None
        receiver, started_at = urlsplit(record.webhook.url).netloc, self._clock.monotonic()
        function = _function(delivery)
        team = self._team_of(function) or function
        if after_s := self._teams.begin(team, started_at):
            raise _Postponed(after_s)
        if after_s := self._receivers.begin(receiver, started_at):
            self._teams.withdraw(team, started_at)
            raise _Postponed(after_s)
        try:
            encode_own = self._payloads.get(record.webhook.form)
            payload = Payload(encode_payload(record, result)) if encode_own is None else encode_own(record, result)
            return await self._post_once(record, record.webhook, payload)
        finally:
            ended_at = self._clock.monotonic()
            self._receivers.end(receiver, started_at, ended_at)
            self._teams.end(team, started_at, ended_at)

    async def _post_once(self, record: CallRecord, webhook: Webhook, payload: Payload) -> _Failure | None:
        at, body = int(self._clock.time()), payload.body
        headers = payload.headers | {
            "user-agent": "gpufn-webhook",
            "webhook-id": record.id,
            "webhook-timestamp": str(at),
            "webhook-signature": signatures(await self._secrets.of(webhook.owner), record.id, at, body),
        }
        if record.trace:
            headers["traceparent"] = traceparent(record.id, record.trace)
            if state := tracestate(record.trace):
                headers["tracestate"] = state
        try:
            status = await self._sender.send(webhook.url, headers, body)
        except AddressRefused as error:
            return _Failure(error.message, record, is_final=True)
        except ReceiverUnreachable as error:
            return _Failure(error.message, record)
        match retry_policy.verdict(status):
            case Verdict.DELIVERED:
                return None
            case verdict:
                return _Failure(f"the receiver answered {status}", record, is_final=verdict is Verdict.GIVE_UP)

    def _retry_after_s(self, delivery: Delivery, failure: _Failure) -> float | None:
        """Return the seconds until the next attempt; None after the last one, which is logged for the function."""
        age_s = self._clock.time() - delivery.stored_at
        retry_after_s = None if failure.is_final else retry_policy.delay_after(age_s)
        if retry_after_s is not None:
            return retry_after_s
        function, invocation, record = _function(delivery), delivery.payload.decode(), failure.record
        which = f"to {record.webhook.url}" if record is not None and record.webhook is not None else f"of {invocation}"
        after = "" if failure.is_final else f" after {age_s / 3600:.1f} hours"
        why = f"the webhook {which} was given up{after}: {failure.text}"
        self._telemetry.of(function).count_webhook("given_up")
        log.warning("%s", why, extra={"function": function, "invocation": invocation})
        revision = 0 if record is None else record.revision
        trace = "" if record is None else traceparent(record.id, record.trace)[3:35]
        line = LogLine(self._clock.time(), function, revision, "", "error", why, invocation, trace=trace)
        with contextlib.suppress(GpufnError):
            self._bus.publish(subjects.logs(function), encode(line))
        return None

    def _on_missing(self) -> None:
        self._tasks.start(self._make_consumer())

    async def _make_consumer(self) -> None:
        try:
            await streams.ensure_streams(self._bus)
            await streams.ensure_consumer(
                self._bus, subjects.WEBHOOKS, subjects.WEBHOOK_CONSUMER, subjects.WEBHOOKS_FILTER,
                ack_wait_s=_ACK_WAIT_S, max_ack_pending=_UNBOUNDED,
            )  # fmt: skip
        except GpufnError as error:
            log.warning("webhooks cannot be pulled yet: %s", error)
            return  # the next tick of the Pull retries
        self._pull.retry()


class _Postponed(Exception):
    """The attempt was postponed."""

    def __init__(self, after_s: float) -> None:
        self.after_s = after_s


class _Failure(NamedTuple):
    """`record` is the call's record, if there is one."""

    text: str
    record: CallRecord | None = None
    is_final: bool = False


def _function(delivery: Delivery) -> str:
    """Return the function's name, the last token of the subject."""
    return delivery.subject.rpartition(".")[2]
