"""Calls whose caller died or gave up are ended and do not run again. Calls whose caller reconnects, or uses the fast
path, go on."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from gpufn_core.domain.invocation import OutcomeKind
from gpufn_core.domain.revision import Revision
from gpufn_core.errors import BusUnavailable
from gpufn_core.protocol import frames, subjects
from gpufn_local.nats_process import EmbeddedServer
from gpufn_platform.bus.connection import Bus, NoResponders
from gpufn_platform.process.clock import SystemClock
from gpufn_platform.queue.caller import Caller
from gpufn_platform.queue.pending import PendingCall
from gpufn_runtime.runner.recovery import abandoned_calls as departed_
from gpufn_runtime.runner.recovery.abandoned_calls import AbandonedCalls
from tests.runtime.runner.node import FakeWorker, Node, SettableClock, on_node
from tests.taking import take

SUBMITTED = SimpleNamespace(message=SimpleNamespace(reply=""), is_direct=False)


def attempt(caller: str, invocation: str, *, is_direct: bool = False) -> Any:
    reply = subjects.reply("f", caller, invocation)
    return SimpleNamespace(message=SimpleNamespace(reply=reply, id=invocation), is_direct=is_direct)


async def has_left(bus: Bus, caller: str) -> None:
    """Wait until the server has noticed the end of a connection."""
    while True:
        try:
            await bus.request(subjects.reply("f", caller, "-"), timeout_s=0.1)
        except NoResponders:
            return
        except BusUnavailable:
            pass


def test_the_calls_of_a_caller_that_is_away_for_a_while_are_ended(nats: EmbeddedServer) -> None:
    async def scenario() -> None:
        bus, clock = await Bus.connect(nats.url, name="runner"), SettableClock()
        callers = {name: await Bus.connect(nats.url, name=name) for name in ("gw-dies", "gw-hangs", "gw-returns")}
        for name, its in callers.items():
            Caller(its, name=name, clock=clock).start()
            await its.flush()
        running = {f"of {name}": attempt(name, f"of {name}") for name in callers if name != "gw-hangs"}
        running |= {"submitted": SUBMITTED, "direct": attempt("gw-dies", "direct", is_direct=True)}
        ended: list[str] = []
        abandoned_calls = AbandonedCalls(bus, running, ended.append, clock)
        for name in ("gw-dies", "gw-returns"):
            await callers.pop(name).close()
            await has_left(bus, name)
        await abandoned_calls.check()
        assert await abandoned_calls.is_waited_for(running["of gw-dies"].message) is None
        clock.skipped_s += departed_._GONE_AFTER_S - 0.1
        await abandoned_calls.check()
        assert ended == []
        callers["gw-returns"] = await Bus.connect(nats.url, name="again")
        callers["gw-returns"].subscribe(
            subjects.replies("gw-returns"), lambda _: None
        )  # an older version: it does not answer
        await callers["gw-returns"].flush()
        clock.skipped_s += 0.2
        await abandoned_calls.check()
        assert ended == ["of gw-dies"]
        assert await abandoned_calls.is_waited_for(running["of gw-dies"].message) is False
        clock.skipped_s += departed_._FORGET_AFTER_S
        await abandoned_calls.check()
        assert ended == ["of gw-dies"]
        for each in (*callers.values(), bus):
            await each.close()

    asyncio.run(scenario())


async def asked_for(node: Node, gateway: Bus, revision: Revision) -> tuple[FakeWorker, frames.Run, PendingCall]:
    """Start a call of another gateway."""
    caller = Caller(gateway, name="another", clock=SystemClock())
    caller.start()
    worker = await node.worker(revision)
    call = caller.invoke(node.request(revision))
    run, _ = await worker.run()
    return worker, run, call


def test_a_call_abandoned_while_the_bus_was_lost_is_ended_and_the_others_continue(url: str, tmp_path: Path) -> None:
    async def test(node: Node) -> None:
        gateway = await Bus.connect(url, name="another")
        revision = await node.deploy("unwanted", concurrency=2)
        worker, run, call = await asked_for(node, gateway, revision)
        back = asyncio.Event()
        gateway.on_reconnect(back.set)
        call.cancel()
        gateway._live().lose("a cable is pulled")  # and loses the last message
        goes_on = node.invoke(revision)
        another, _ = await worker.run()
        await back.wait()
        await gateway.flush()
        await node.serving._abandoned_calls.check()
        assert (await worker.next())[0] == frames.Cancel(run.attempt)
        worker.answer(another, b"7")
        assert (await goes_on.future)[1] == b"7"
        await gateway.close()

    on_node(url, tmp_path, test)


def test_a_redelivered_call_does_not_run_for_a_lost_caller(url: str, tmp_path: Path) -> None:
    async def test(node: Node) -> None:
        gateway = await Bus.connect(url, name="another")
        revision = await node.deploy("nobody")
        caller = Caller(gateway, name="another", clock=SystemClock())
        caller.start()
        caller.invoke(node.request(revision))
        caller.invoke(node.request(revision))
        kept = await take(node.bus, "nobody", 2, is_sync=True)
        await gateway.close()
        await has_left(node.bus, "another")
        waited_for = node.invoke(revision)
        for each in kept:
            each.nak()  # their caller died: for example a runner that had made both calls
        worker = await node.worker(revision)
        run, _ = await worker.run()
        assert run.invocation == waited_for.id
        node.clock.skipped_s += departed_._GONE_AFTER_S
        worker.answer(run)
        await node.queue_is_empty(revision)
        await worker.close()

    on_node(url, tmp_path, test)


def test_queued_calls_of_a_dead_gateway_do_not_run(url: str, tmp_path: Path) -> None:
    """Each call held a slot until the next check found that no caller waits."""

    async def test(node: Node) -> None:
        gateway = await Bus.connect(url, name="another")
        revision = await node.deploy("left")
        caller = Caller(gateway, name="another", clock=SystemClock())
        caller.start()
        worker = await node.worker(revision)
        runs, *_ = [caller.invoke(node.request(revision)) for _ in range(3)]
        run, _ = await worker.run()
        assert run.invocation == runs.id
        await gateway.flush()
        waited_for = node.invoke(revision)
        await gateway.close()
        await has_left(node.bus, "another")
        abandoned_calls = node.serving._abandoned_calls
        await abandoned_calls.check()
        node.clock.skipped_s += departed_._GONE_AFTER_S
        await abandoned_calls.check()
        assert (await worker.next())[0] == frames.Cancel(run.attempt)
        worker.send(frames.Result(run.attempt, OutcomeKind.CANCELLED, None, "", 0.0))
        run, _ = await worker.run()
        assert run.invocation == waited_for.id
        worker.answer(run)
        await node.queue_is_empty(revision)

    on_node(url, tmp_path, test)
