"""Schedules on a bus: what is due is submitted once, whichever gateway leads, and never while paused."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest

from gpufn_core.errors import BusUnavailable, InvalidSpec
from gpufn_core.protocol import subjects
from gpufn_core.protocol.messages import InvocationMessage, unpack_invocation
from gpufn_core.protocol.records import ScheduleRecord
from gpufn_core.spec.function_spec import MethodSpec
from gpufn_core.spec.schedule import Schedule
from gpufn_gateway.functions.deploy_checks import DeployOptions
from gpufn_gateway.schedules import store
from gpufn_gateway.schedules.runs import ScheduleRuns
from gpufn_gateway.schedules.store import Schedules
from gpufn_gateway.store_sync import StoreSync
from gpufn_platform.bus.storage import streams
from gpufn_platform.queue.records import call_records
from tests.gateway.whole import DIGEST, Whole, gateway_on
from tests.waiting import until_async

NO_DISK = StoreSync(None, waits=False)
MINUTELY = Schedule("* * * * *", arguments={"texts": ["x"]})


class Led:
    """A leader whose clock the test sets."""

    def __init__(self, gateway: Whole, now: float) -> None:
        self.now = now
        self.registry = gateway.registry
        self.schedules = Schedules(gateway.bus, gateway.buckets.schedules, gateway.registry, self)
        self.runs = ScheduleRuns(self.schedules, gateway.registry, self, NO_DISK, gateway.quotas, leads=lambda: True)

    @classmethod
    async def from_now(cls, gateway: Whole, now: float) -> Led:
        self = cls(gateway, now)
        await self.schedules.start()
        return self

    def time(self) -> float:
        return self.now

    def monotonic(self) -> float:
        return self.now

    async def at(self, now: float) -> None:
        self.now = now
        await self.runs.step()

    def of(self, function: str) -> list[ScheduleRecord]:
        return [record for record in self.schedules.known.values() if record.function == function]


NOON = 1_772_366_400.0  # a whole minute


@contextlib.asynccontextmanager
async def empty(nats: Any) -> AsyncIterator[Whole]:
    async with gateway_on(nats) as gateway:
        for key in await gateway.buckets.schedules.keys():
            await gateway.buckets.schedules.delete(key)
        yield gateway


async def queued(gateway: Whole, function: str, revision: int = 1) -> list[tuple[InvocationMessage, bytes]]:
    found, seq = [], 1
    subject = subjects.async_queue(function, revision, "*")
    while (message := await streams.next_message(gateway.bus, subjects.ASYNC, subject, seq)) is not None:
        found.append(unpack_invocation(message.payload))
        seq = message.seq + 1
    return found


async def test_a_declared_schedule_calls_its_function_each_time_it_is_due(nats: Any, make: Any) -> None:
    async with empty(nats) as gateway:
        await gateway.deploys.deploy(make.spec("minutely", schedule=MINUTELY), DIGEST)
        leader = await Led.from_now(gateway, NOON)
        for offset, calls in ((0, 0), (59, 0), (60, 1), (61, 1), (119, 1), (120.4, 2)):
            await leader.at(NOON + offset)
            assert len(await queued(gateway, "minutely")) == calls, offset
        first, body = (await queued(gateway, "minutely"))[0]
        assert (body, first.content_type) == (b'{"texts":["x"]}', "application/json")
        (record,) = leader.of("minutely")
        last = (await queued(gateway, "minutely"))[-1][0]
        assert (record.id, record.declared, record.invocation) == ("minutely", True, last.id)


async def test_two_leaders_submit_a_call_once_even_if_one_dies_before_it_records_it(nats: Any, make: Any) -> None:
    async with empty(nats) as gateway:
        await gateway.deploys.deploy(make.spec("twice", schedule=MINUTELY), DIGEST)
        one, other = await Led.from_now(gateway, NOON), await Led.from_now(gateway, NOON)
        await one.at(NOON)
        await other.at(NOON)
        before = one.schedules.get("twice")
        await asyncio.gather(one.at(NOON + 60), other.at(NOON + 60))
        assert len(await queued(gateway, "twice")) == 1
        await one.schedules.change("twice", lambda _: before)  # as if the run had not been recorded
        await one.at(NOON + 61)
        assert len(await queued(gateway, "twice")) == 1


async def test_a_one_time_schedule_runs_and_is_removed(nats: Any, make: Any) -> None:
    async with empty(nats) as gateway:
        await gateway.deploys.deploy(make.spec("later"), DIGEST)
        leader = await Led.from_now(gateway, NOON)
        target = leader.registry.resolve("later")
        await leader.schedules.add(target, Schedule(at=NOON + 600, arguments={"texts": []}))
        for offset, calls, left in ((1, 0, 1), (599, 0, 1), (5000, 1, 0), (5001, 1, 0)):
            await leader.at(NOON + offset)
            assert (len(await queued(gateway, "later")), len(leader.of("later"))) == (calls, left)


async def test_runs_that_a_pause_skipped_are_not_repeated(nats: Any, make: Any) -> None:
    async with empty(nats) as gateway:
        await gateway.deploys.deploy(make.spec("paused", schedule=MINUTELY), DIGEST)
        leader = await Led.from_now(gateway, NOON)
        await leader.at(NOON)
        await leader.schedules.pause("paused", paused=True)
        await leader.at(NOON + 600)
        await leader.schedules.pause("paused", paused=False)
        await leader.at(NOON + 601)
        assert await queued(gateway, "paused") == []
        await leader.at(NOON + 660)
        assert len(await queued(gateway, "paused")) == 1


async def test_a_one_time_schedule_whose_time_fell_into_a_pause_is_removed_after_it(nats: Any, make: Any) -> None:
    async with empty(nats) as gateway:
        await gateway.deploys.deploy(make.spec("slept"), DIGEST)
        leader = await Led.from_now(gateway, NOON)
        record = await leader.schedules.add(
            leader.registry.resolve("slept"), Schedule(at=NOON + 600, arguments={"texts": []})
        )
        await leader.schedules.pause(record.id, paused=True)
        await leader.at(NOON + 700)
        assert len(leader.of("slept")) == 1
        await leader.schedules.pause(record.id, paused=False)
        await leader.at(NOON + 701)
        assert (leader.of("slept"), await queued(gateway, "slept")) == ([], [])


async def redeployed(gateway: Whole, make: Any, spec: Any) -> None:
    """Deploy a second revision, which serves at once."""
    gateway.report(make.status(spec.name, ready=0))
    await gateway.deploys.deploy(spec, DIGEST, DeployOptions(check=False))


def classy(make: Any, name: str, **fields: Any) -> Any:
    return make.spec(name, MethodSpec(name="fit", parameters=make.ARGUMENTS), is_class=True, **fields)


@pytest.mark.parametrize("fields", [{"function": "model.fit"}, {"function": "model", "method": "fit"}])
async def test_a_method_of_a_class_is_scheduled_in_either_spelling_and_called(
    nats: Any, make: Any, fields: dict[str, str]
) -> None:
    async with empty(nats) as gateway:
        await gateway.deploys.deploy(classy(make, "model"), DIGEST)
        wanted = {"cron": "* * * * *", "arguments": {"texts": ["x"]}, "priority": "hi"} | fields
        made = (await gateway.http.post("/v1/schedules", json=wanted)).json()
        assert (made["function"], made["method"]) == ("model", "fit")
        before = len(await queued(gateway, "model"))
        leader = await Led.from_now(gateway, made["created_at"])
        await leader.at(made["created_at"] + 61)
        calls = await queued(gateway, "model")
        assert [call.method for call, _ in calls[before:]] == ["fit"]


async def test_a_class_without_a_method_and_a_method_that_is_not_there_cannot_be_scheduled(
    nats: Any, make: Any, problem: Any
) -> None:
    async with empty(nats) as gateway:
        await gateway.deploys.deploy(classy(make, "bare"), DIGEST)
        for fields in ({"function": "bare"}, {"function": "bare.other"}, {"function": "bare.fit", "method": "fit"}):
            refused = await gateway.http.post("/v1/schedules", json={"in_s": 5} | fields)
            assert problem(refused) == (404, "function_not_found")


async def test_a_schedule_paused_at_another_gateway_does_not_run_before_the_leader_learns_of_it(
    nats: Any, make: Any
) -> None:
    async with empty(nats) as gateway:
        await gateway.deploys.deploy(make.spec("deaf-leader", schedule=MINUTELY), DIGEST)
        leader = await Led.from_now(gateway, NOON)
        await leader.at(NOON)
        leader.schedules.stop()  # its watch is dead
        await gateway.schedules.pause("deaf-leader", paused=True)
        await leader.at(NOON + 61)
        assert await queued(gateway, "deaf-leader") == []


async def test_a_pause_unknown_to_the_leader_survives_a_changed_schedule(nats: Any, make: Any) -> None:
    async with empty(nats) as gateway:
        await gateway.deploys.deploy(make.spec("line", schedule=MINUTELY), DIGEST)
        leader = await Led.from_now(gateway, NOON)
        await leader.at(NOON)
        leader.schedules.stop()
        await gateway.schedules.pause("line", paused=True)
        hourly = Schedule("0 * * * *", arguments={"texts": ["x"]})
        await redeployed(gateway, make, make.spec("line", schedule=hourly))
        await leader.at(NOON + 5)
        stored = await gateway.schedules.pause("line", paused=True)
        assert (stored.paused, stored.schedule, stored.done_until) == (True, hourly, NOON + 5)


async def test_after_a_clock_that_was_far_ahead_runs_go_on(nats: Any, make: Any) -> None:
    async with empty(nats) as gateway:
        await gateway.deploys.deploy(make.spec("ahead", schedule=MINUTELY), DIGEST)
        leader = await Led.from_now(gateway, NOON)
        await leader.at(NOON + 10 * 365 * 86_400)
        await leader.at(NOON + 10 * 365 * 86_400 + 60)
        assert len(await queued(gateway, "ahead")) == 1
        await leader.at(NOON + 1)  # the clock is right again
        await leader.at(NOON + 60)
        assert len(await queued(gateway, "ahead")) == 2


async def test_a_leader_whose_clock_is_a_little_behind_waits_and_repeats_nothing(nats: Any, make: Any) -> None:
    async with empty(nats) as gateway:
        await gateway.deploys.deploy(make.spec("behind", schedule=MINUTELY), DIGEST)
        leader = await Led.from_now(gateway, NOON)
        await leader.at(NOON)
        await leader.at(NOON + 62)
        await leader.at(NOON + 58)
        (record,) = leader.of("behind")
        assert record.done_until == NOON + 62
        await leader.at(NOON + 120)
        assert len(await queued(gateway, "behind")) == 2


async def test_a_time_whose_call_was_made_with_other_arguments_is_done(nats: Any, make: Any) -> None:
    """For example by a clock that was ahead: the call's id is derived from the schedule and the time."""
    async with empty(nats) as gateway:
        await gateway.deploys.deploy(make.spec("other", schedule=MINUTELY), DIGEST)
        leader = await Led.from_now(gateway, NOON)
        await leader.at(NOON)
        record = leader.schedules.get("other")
        await leader.schedules.submit(record, NOON + 60)
        changed = Schedule("* * * * *", arguments={"texts": ["y"]})
        await redeployed(gateway, make, make.spec("other", schedule=changed))
        await leader.at(NOON + 1)
        await leader.at(NOON + 60)
        await leader.at(NOON + 120)
        assert [body for _, body in await queued(gateway, "other", 2)] == [b'{"texts":["y"]}']


async def test_a_schedule_that_cannot_be_called_is_reported_once_and_not_each_second(
    nats: Any, make: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async with empty(nats) as gateway:
        await gateway.deploys.deploy(classy(make, "renamed"), DIGEST)
        leader = await Led.from_now(gateway, NOON)
        await leader.schedules.add(
            leader.registry.resolve("renamed.fit"), Schedule("* * * * *", arguments={"texts": ["x"]})
        )
        await redeployed(gateway, make, make.spec("renamed"))
        for second in range(60, 65):
            await leader.at(NOON + second)
        assert [record.levelname for record in caplog.records if "renamed" in record.message] == ["WARNING"]


async def test_a_schedule_is_removed_with_its_function(nats: Any, make: Any) -> None:
    async with empty(nats) as gateway:
        await gateway.deploys.deploy(make.spec("gone", schedule=MINUTELY), DIGEST)
        leader = await Led.from_now(gateway, NOON)
        await leader.at(NOON)
        target = leader.registry.resolve("gone")
        await leader.schedules.add(target, Schedule("0 0 1 1 *", arguments={"texts": []}))
        assert len(leader.of("gone")) == 2
        await gateway.deploys.delete("gone")
        await leader.at(NOON + 120)
        assert leader.of("gone") == []


async def test_over_http_a_schedule_is_added_listed_run_paused_and_removed(nats: Any, make: Any) -> None:
    async with empty(nats) as gateway:
        http = gateway.http
        await gateway.deploys.deploy(make.spec("served"), DIGEST)
        wanted = {"function": "served", "cron": "0 6 * * *", "timezone": "Europe/Berlin", "arguments": {"texts": ["a"]}}
        made = (await http.post("/v1/schedules", json=wanted)).json()
        assert made["id"].startswith("served.")
        assert (made["paused"], made["declared"], made["next_at"] % 3600) == (False, False, 0.0)
        assert (await http.get("/v1/schedules?function=served")).json() == {"schedules": [made]}
        run = await http.post(f"/v1/schedules/{made['id']}/run")
        self_ = f"/v1/invocations/{run.json()['id']}"
        links = {"self": self_, "result": f"{self_}/result", "events": f"{self_}/events"}
        assert (run.headers["location"], run.json()["links"]) == (self_, links)  # as for a submit
        assert run.status_code == 202
        assert await call_records.read(gateway.bus, run.json()["id"]) is not None
        paused = (await http.post(f"/v1/schedules/{made['id']}/pause")).json()
        assert (paused["paused"], paused["next_at"]) == (True, None)
        assert (await http.post(f"/v1/schedules/{made['id']}/resume")).json()["next_at"] == made["next_at"]
        assert (await http.delete(f"/v1/schedules/{made['id']}")).status_code == 204
        assert (await http.get("/v1/schedules")).json() == {"schedules": []}


@pytest.mark.parametrize(
    ("fields", "answer"),
    [
        ({"cron": "0 0 30 2 *"}, (422, "invalid_spec")),
        ({"cron": "0 6 * * *", "timezone": "Nowhere"}, (422, "invalid_spec")),
        ({"cron": "0 6 * * *", "arguments": {"texts": 5}}, (422, "invalid_input")),
        ({"cron": "0 6 * * *", "arguments": {}}, (422, "invalid_input")),
        ({"cron": "0 6 * * *", "in_s": 5}, (422, "invalid_input")),
        ({}, (422, "invalid_input")),
        ({"in_s": -1}, (422, "invalid_input")),
        ({"in_s": 1e-9}, (422, "invalid_input")),
        ({"in_s": 1e12}, (422, "invalid_input")),
        ({"at": 5.0}, (422, "invalid_input")),
        ({"cron": "0 6 * * *", "function": "nobody"}, (404, "function_not_found")),
        ({"cron": "0 6 * * *", "missed": "most"}, (422, "invalid_input")),
        ({"cron": "0 6 * * *", "colour": "red"}, (422, "invalid_input")),
    ],
)
async def test_a_schedule_that_cannot_be_is_refused(
    nats: Any, make: Any, problem: Any, fields: dict[str, Any], answer: tuple[int, str]
) -> None:
    async with empty(nats) as gateway:
        await gateway.deploys.deploy(make.spec("strict"), DIGEST)
        wanted = {"function": "strict", "arguments": {"texts": ["a"]}} | fields
        assert problem(await gateway.http.post("/v1/schedules", json=wanted)) == answer
        assert await gateway.buckets.schedules.keys() == []


async def test_a_function_whose_schedule_calls_it_wrongly_is_refused(nats: Any, make: Any) -> None:
    async with empty(nats) as gateway:
        no_text, no_such = ({"texts": [1]}, "expected str, got int"), ({"texts": [], "y": 1}, "y: there is no such")
        for arguments, said in (no_text, no_such):
            spec = make.spec("wrong", schedule=Schedule("* * * * *", arguments=arguments))
            with pytest.raises(InvalidSpec, match=said):
                await gateway.deploys.deploy(spec, DIGEST)
        assert "wrong" not in gateway.registry.functions


async def test_a_schedule_that_is_not_there_or_is_declared_cannot_be_removed(
    nats: Any, make: Any, problem: Any
) -> None:
    async with empty(nats) as gateway:
        assert problem(await gateway.http.delete("/v1/schedules/none")) == (404, "schedule_not_found")
        assert problem(await gateway.http.post("/v1/schedules/none/run")) == (404, "schedule_not_found")
        await gateway.deploys.deploy(make.spec("own", schedule=MINUTELY), DIGEST)
        runs = (await Led.from_now(gateway, gateway.clock.time())).runs
        await runs.step()
        refused = await gateway.http.delete("/v1/schedules/own")
        assert problem(refused) == (409, "conflict")
        assert "pause" in refused.json()["detail"]


async def test_the_schedules_of_a_function_are_removed_with_it_although_its_name_is_reused_at_once(
    nats: Any, make: Any
) -> None:
    """Schedules of the last minute used to stay, and called the next function of the name."""
    async with empty(nats) as gateway:
        for name in ("renewed", "renewed-too"):
            await gateway.deploys.deploy(make.spec(name, schedule=MINUTELY), DIGEST)
            await gateway.schedules.add(
                gateway.registry.resolve(name), Schedule("0 6 * * *", arguments={"texts": ["x"]})
            )
        led = await Led.from_now(gateway, NOON)
        await led.at(NOON)
        assert len(await gateway.buckets.schedules.keys("renewed")) == 4
        await gateway.deploys.delete("renewed")
        await gateway.deploys.deploy(make.spec("renewed"), DIGEST)
        assert {key.partition(".")[0] for key in await gateway.buckets.schedules.keys("renewed")} == {"renewed-too"}


async def test_a_call_is_on_the_disk_before_its_schedule_records_it(
    nats: Any, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`GPUFN_SYNC=always` promises this for every accepted call."""
    async with empty(nats) as gateway:
        await gateway.deploys.deploy(make.spec("synced", schedule=MINUTELY), DIGEST)
        led = await Led.from_now(gateway, NOON)
        await led.at(NOON)

        async def calls_and_time() -> tuple[int, float]:
            record = await led.schedules.stored("synced")
            assert record is not None
            return len(await queued(gateway, "synced")), record.done_until

        async def fails() -> None:
            raise BusUnavailable("The disk of the message bus failed.")

        with monkeypatch.context() as patched:
            patched.setattr(NO_DISK, "sync_calls", fails)
            await led.at(NOON + 60)
        assert await calls_and_time() == (1, NOON)
        await led.at(NOON + 61)
        assert await calls_and_time() == (1, NOON + 61)


async def test_the_schedules_of_a_team_wait_while_it_may_queue_no_further_call(nats: Any, make: Any) -> None:
    """Regression: a team exceeded --queued by schedules."""
    async with empty(nats) as gateway:
        for name in ("prod/cron/one", "prod/cron/two", "free"):
            await gateway.deploys.deploy(make.spec(name, schedule=MINUTELY), DIGEST)
        await gateway.http.put("/v1/teams/cron", json={"owns": ["prod/cron/*"], "limits": {"queued": 1}})
        led = await Led.from_now(gateway, NOON)
        for second in (0, 60, 61):
            await led.at(NOON + second)
        calls = [len(await queued(gateway, name)) for name in ("prod/cron/one", "prod/cron/two", "free")]
        assert (sorted(calls[:2]), calls[2]) == ([0, 1], 1)
        await gateway.http.delete("/v1/teams/cron")
        await until_async(lambda: not len(gateway.registry.teams))
        await led.at(NOON + 62)
        assert [len(await queued(gateway, name)) for name in ("prod/cron/one", "prod/cron/two")] == [1, 1]
        for name in ("prod/cron/one", "prod/cron/two", "free"):
            await gateway.http.delete(f"/v1/functions/{name}")


async def test_a_team_leaves_schedules_for_others(
    nats: Any, make: Any, monkeypatch: pytest.MonkeyPatch, problem: Any
) -> None:
    """Regression: one team could use up the schedules of all."""
    monkeypatch.setattr(store, "_MAX_OF_TEAM", 1)
    async with empty(nats) as gateway:
        for name in ("prod/cron/f", "free"):
            await gateway.deploys.deploy(make.spec(name), DIGEST)
        await gateway.http.put("/v1/teams/cron", json={"owns": ["prod/cron/*"]})

        async def add(name: str) -> Any:
            body = {"function": name, "cron": "0 6 * * *", "arguments": {"texts": []}}
            return await gateway.http.post("/v1/schedules", json=body)

        assert (await add("prod/cron/f")).status_code == 201
        await until_async(lambda: bool(gateway.schedules.known))
        assert problem(await add("prod/cron/f")) == (503, "capacity")
        assert (await add("free")).status_code == 201
        await gateway.http.delete("/v1/teams/cron")
        for name in ("prod/cron/f", "free"):
            await gateway.http.delete(f"/v1/functions/{name}")
