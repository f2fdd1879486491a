"""The reaper: which queued calls it ends, and that it removes them from their queue."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from gpufn_core.domain.invocation import InvocationState, OutcomeKind
from gpufn_core.protocol import subjects
from gpufn_core.protocol.codec import encode
from gpufn_core.protocol.messages import CallLocation, Cancel, InvocationMessage
from gpufn_core.protocol.records import AttemptRecord
from gpufn_gateway.submitted import reap_rules
from gpufn_gateway.submitted.reaper import Reaper
from gpufn_platform.bus.storage import streams
from gpufn_platform.bus.typed_handler import decoded
from gpufn_platform.process.clock import SystemClock
from gpufn_platform.queue.records import call_records, dead_letters
from tests.gateway.whole import DIGEST, Whole, gateway_on
from tests.taking import take

GOOD = b'{"texts":["a"]}'
DAY = 86400.0
TRIED = AttemptRecord(1, OutcomeKind.RAISED, ended_at=2 * DAY)


class Ahead(SystemClock):
    """A clock that is `ahead_s` ahead."""

    def __init__(self, ahead_s: float) -> None:
        self.ahead_s = ahead_s

    def time(self) -> float:
        return SystemClock.time() + self.ahead_s


@pytest.mark.parametrize(
    ("fields", "waited_s", "options", "outcome"),
    [
        ({}, 12 * DAY, {}, None),
        ({}, 13.1 * DAY, {}, "expired"),
        ({"attempt": 2, "attempts": (TRIED,)}, 14.9 * DAY, {}, None),  # it was requeued after two days
        ({"attempt": 2, "attempts": (TRIED,)}, 15.1 * DAY, {}, "expired"),
        ({"deadline": 10.0}, 9.0, {}, None),
        ({"deadline": 10.0}, 11.0, {}, None),  # a runner that holds it would end it
        ({"deadline": 10.0}, 12.1, {}, "expired"),
        ({}, 12.1, {"queue_timeout_s": 10.0}, "expired"),
        ({"attempt": 2}, 12.1, {"queue_timeout_s": 10.0}, None),
        ({}, 59.0, None, None),  # it may have been deployed just now
        ({}, 61.0, None, "cancelled"),
    ],
)
def test_a_call_waits_while_a_worker_may_run_it(
    make: Any, fields: dict[str, Any], waited_s: float, options: dict[str, Any] | None, outcome: str | None
) -> None:
    invocation = InvocationMessage("1" * 26, "f", 1, "", "", "", "", 0.0, **fields)
    spec = None if options is None else make.spec("f", **options)
    decided = reap_rules.verdict(invocation, spec, waited_s)
    assert (None if decided is None else decided.kind.value) == outcome


async def submit(gateway: Whole, function: str, **headers: str) -> str:
    given = {name.replace("_", "-"): text for name, text in headers.items()}
    answer = await gateway.http.post(f"/v1/functions/{function}/submit", content=GOOD, headers=given)
    return str(answer.json()["id"])


async def state_of(gateway: Whole, invocation: str) -> InvocationState:
    found = await call_records.read(gateway.bus, invocation)
    assert found is not None
    return found[0].state


def reaper(gateway: Whole, ahead_s: float) -> Reaper:
    return Reaper(gateway.bus, gateway.registry, Ahead(ahead_s), leads=lambda: True)


@pytest.mark.parametrize("priority", ["hi", "low"])
async def test_a_call_that_expired_without_a_worker_ends_and_leaves_a_dead_letter(
    nats: Any, make: Any, priority: str
) -> None:
    name, given = f"idle-{priority}", {"x_gpufn_priority": priority}
    async with gateway_on(nats) as gateway:
        await gateway.deploys.deploy(make.spec(name), DIGEST)
        late, patient = await submit(gateway, name, x_gpufn_timeout="1", **given), await submit(gateway, name)
        assert await reaper(gateway, 0.0).step() == 0
        await reaper(gateway, 5.0).step()
        assert (await state_of(gateway, late), await state_of(gateway, patient)) == ("expired", "queued")
        assert (await streams.depths(gateway.bus))[name, 1].asynchronous == 1
        found = await dead_letters.read(gateway.bus, name, late)
        assert found is not None
        assert (found[0].state, found[0].priority.value, found[1]) == (InvocationState.EXPIRED, priority, GOOD)


async def test_calls_of_a_runner_are_left_to_it(nats: Any, make: Any) -> None:
    async with gateway_on(nats) as gateway:
        await gateway.deploys.deploy(make.spec("has"), DIGEST)
        invocation = await submit(gateway, "has", x_gpufn_timeout="1")
        held = encode(CallLocation(invocation, "w", "n", 1, 1.0))
        answer = gateway.bus.subscribe(subjects.WHEREABOUTS, lambda message: gateway.bus.publish(message.reply, held))
        await reaper(gateway, 5.0).step()
        assert await state_of(gateway, invocation) == "queued"
        answer.unsubscribe()


async def test_calls_of_a_runner_are_left_to_it_even_if_it_reports_late(nats: Any, make: Any) -> None:
    async with gateway_on(nats) as gateway:
        await gateway.deploys.deploy(make.spec("slow"), DIGEST)
        invocation = await submit(gateway, "slow", x_gpufn_timeout="1")
        await take(gateway.bus, "slow")
        asked: list[str] = []

        def whereabouts(message: Any) -> None:
            asked.append(message.reply)
            if len(asked) > 1:
                gateway.bus.publish(message.reply, encode(CallLocation(invocation, "w", "n", 1, 1.0)))

        answer = gateway.bus.subscribe(subjects.WHEREABOUTS, whereabouts)
        await reaper(gateway, 5.0).step()
        assert await state_of(gateway, invocation) == "queued"
        answer.unsubscribe()


async def test_the_queue_timeout_does_not_end_a_call_that_a_dead_runner_may_have_begun(nats: Any, make: Any) -> None:
    """No runner has the call until a new one has started. It is redelivered then, and continues from its checkpoint."""
    async with gateway_on(nats) as gateway:
        await gateway.deploys.deploy(make.spec("begun", queue_timeout_s=1.0), DIGEST)
        begun, late = await submit(gateway, "begun"), await submit(gateway, "begun", x_gpufn_timeout="1")
        await take(gateway.bus, "begun", 2)
        waits = await submit(gateway, "begun")
        await reaper(gateway, 5.0).step()
        assert [await state_of(gateway, each) for each in (begun, late, waits)] == ["queued", "expired", "expired"]


async def test_calls_of_a_deleted_function_are_cancelled(nats: Any, make: Any) -> None:
    async with gateway_on(nats) as gateway:
        await gateway.deploys.deploy(make.spec("gone"), DIGEST)
        invocation = await submit(gateway, "gone")
        # Another gateway deleted the function, and died before it ended the queued calls.
        gateway.registry.on_function("gone", None)
        await reaper(gateway, 120.0).step()
        assert await state_of(gateway, invocation) == "cancelled"
        assert ("gone", 1) not in await streams.depths(gateway.bus)
        assert await dead_letters.read(gateway.bus, "gone", invocation) is None


async def test_ended_calls_leave_their_queue(nats: Any, make: Any) -> None:
    async with gateway_on(nats) as gateway:
        await gateway.deploys.deploy(make.spec("over"), DIGEST)
        ends = (InvocationState.CANCELLED, InvocationState.FAILED)
        made = [await submit(gateway, "over") for _ in ends]
        for invocation, state in zip(made, ends, strict=True):
            found = await call_records.read(gateway.bus, invocation)
            assert found is not None
            # The process that ended the call died before it removed the message.
            assert await call_records.end(gateway.bus, msgspec.structs.replace(found[0], state=state, ended_at=1.0))
        told: list[Cancel] = []
        cancels = msgspec.msgpack.Decoder(Cancel)
        gateway.bus.subscribe(subjects.CANCELS, decoded(cancels, told.append))
        await reaper(gateway, 5.0).step()
        assert (await streams.depths(gateway.bus))["over", 1].asynchronous == 2
        await reaper(gateway, 15.0).step()
        await gateway.bus.flush()
        assert told == [Cancel(made[0])]  # a runner that holds it must stop it
        assert ("over", 1) not in await streams.depths(gateway.bus)
        letters = [await dead_letters.read(gateway.bus, "over", invocation) for invocation in made]
        assert [letter is not None for letter in letters] == [False, True]


async def test_a_long_queue_is_looked_through_in_parts(nats: Any, make: Any) -> None:
    async with gateway_on(nats) as gateway:
        await gateway.deploys.deploy(make.spec("long"), DIGEST)
        for _ in range(100):
            await submit(gateway, "long")
        late = await submit(gateway, "long", x_gpufn_timeout="1")
        looks = reaper(gateway, 5.0)
        await looks.step()
        assert await state_of(gateway, late) == "queued"
        await looks.step()
        assert await state_of(gateway, late) == "expired"
