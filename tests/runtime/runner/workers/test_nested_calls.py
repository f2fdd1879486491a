"""Nested calls, and the deadline and end that they inherit."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path

import msgspec
import pytest

from gpufn_core.domain.invocation import InvocationState, OutcomeKind
from gpufn_core.domain.team import Team, TeamLimits
from gpufn_core.domain.worker import WorkerState
from gpufn_core.encoding import media
from gpufn_core.errors import BusUnavailable, ErrorInfo
from gpufn_core.protocol import frames, subjects
from gpufn_core.protocol.codec import encode
from gpufn_core.protocol.limits import LONGEST_TIMEOUT_S, MESSAGE_BYTES
from gpufn_core.protocol.messages import InvocationMessage, unpack_invocation
from gpufn_core.protocol.records import CallRecord
from gpufn_core.protocol.reports import ControllerReport, FunctionStatus, WorkerCounts
from gpufn_core.protocol.streams.stream_window import STREAM_WINDOW
from gpufn_core.spec.function_spec import CallKind
from gpufn_platform.bus.connection import Bus
from gpufn_platform.bus.storage import object_store, streams
from gpufn_platform.queue import large_bodies, queued_calls
from gpufn_platform.queue.call_request import CallRequest
from gpufn_platform.queue.caller import Caller
from gpufn_platform.queue.pending import PendingCall
from gpufn_platform.queue.records import call_records
from gpufn_platform.shared_bodies.bodies import SharedBodies
from gpufn_runtime.runner.workers.nested_calls import _Window
from tests.runtime.runner.node import Node, on_node
from tests.taking import take
from tests.waiting import until_async

LARGE = bytes(range(251)) * (MESSAGE_BYTES // 251 + 1)
TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def call_of(parent: frames.Run, number: int = 1, timeout_s: float | None = None) -> frames.Call:
    return frames.Call(number, "call", "child", "", "application/json", "", timeout_s, parent.attempt)


async def queued(node: Node) -> InvocationMessage:
    """Return the child's invocation from its queue."""
    while True:
        message = await streams.next_message(node.bus, subjects.SYNC, subjects.sync_queue("child", 1), 1)
        if message is not None:
            return unpack_invocation(message.payload)[0]


def test_a_call_has_no_more_time_than_its_parent(url: str, tmp_path: Path) -> None:
    async def test(node: Node) -> None:
        await node.deploy("child")
        revision = await node.deploy("parent")
        worker = await node.worker(revision)
        until = node.clock.time() + 5.0
        node.invoke(revision, timeout_s=5.0)
        run, _ = await worker.run()
        worker.send(call_of(run), b"{}")
        assert (await queued(node)).deadline <= until + 0.1

    on_node(url, tmp_path, test)


@pytest.mark.parametrize("verb", ["call", "stream", "submit"])
@pytest.mark.parametrize("may_pickle", [False, True])
def test_pickled_arguments_are_for_a_function_that_accepts_them(
    url: str, tmp_path: Path, verb: str, *, may_pickle: bool
) -> None:
    """The runner refuses them, because a worker has no API key."""

    async def test(node: Node) -> None:
        await node.deploy("child", pickle=may_pickle)
        worker = await node.worker(await node.deploy("parent"))
        worker.send(frames.Call(1, frames.Verb(verb), "child", "", media.PICKLED, "", None, 0), b"\x80")
        if may_pickle and verb != "submit":
            assert (await queued(node)).content_type == media.PICKLED
            return
        answer, _ = await worker.next()
        assert isinstance(answer, frames.Answer)
        if may_pickle:
            assert answer.kind is OutcomeKind.SUCCEEDED
        else:
            assert answer.error is not None
            assert answer.error.code == "unsupported_media_type"
            assert "child" in answer.error.message

    on_node(url, tmp_path, test)


@pytest.mark.parametrize("verb", ["status", "result", "cancel"])
@pytest.mark.parametrize(("callers", "code"), [((), "invocation_not_found"), (("parent",), None)])
def test_the_calls_of_another_team_do_not_exist(
    url: str, tmp_path: Path, verb: str, callers: tuple[str, ...], code: str | None
) -> None:
    async def test(node: Node) -> None:
        theirs = await node.deploy("child")
        worker = await node.worker(await node.deploy("parent"))
        await node.teams.put("ads", encode(Team(name="ads", owns=("child",), callers=callers)))
        await until_async(lambda: not node.serving._directory.may_call("other", "child"))
        request = CallRequest(theirs, "", "application/json", b"{}", "", 0.0)
        record = await call_records.submit(node.bus, request, now=node.clock.time())
        worker.send(frames.Call(1, frames.Verb(verb), record.id, "", "", "", 0.0, 0))
        answer, _ = await worker.next()
        assert isinstance(answer, frames.Answer)
        if code is None:
            assert answer.error is None or answer.error.code != "invocation_not_found"
        else:
            assert answer.error is not None
            assert answer.error.code == code
        await node.teams.delete("ads")

    on_node(url, tmp_path, test)


def test_a_call_keeps_its_own_shorter_time(url: str, tmp_path: Path) -> None:
    async def test(node: Node) -> None:
        await node.deploy("child")
        revision = await node.deploy("parent")
        worker = await node.worker(revision)
        node.invoke(revision, timeout_s=20.0)
        run, _ = await worker.run()
        worker.send(call_of(run, timeout_s=3.0), b"{}")
        message = await queued(node)
        assert round(message.deadline - message.submitted_at, 1) == 3.0

    on_node(url, tmp_path, test)


@pytest.mark.parametrize(
    ("timeout_s", "has_s"), [(None, None), (3.0, 3.0), (math.inf, LONGEST_TIMEOUT_S), (math.nan, LONGEST_TIMEOUT_S)]
)
def test_a_call_that_a_function_submits_has_its_own_timeout(
    url: str, tmp_path: Path, timeout_s: float | None, has_s: float | None
) -> None:
    async def test(node: Node) -> None:
        await node.deploy("child")
        revision = await node.deploy("parent")
        worker = await node.worker(revision)
        node.invoke(revision, timeout_s=20.0)
        run, _ = await worker.run()
        worker.send(frames.Call(1, "submit", "child", "", "application/json", "", timeout_s, run.attempt), b"{}")
        (delivery,) = await take(node.bus, "child")
        message = queued_calls.unpack(delivery.payload, delivery.seq)[0]
        assert (round(message.deadline - message.submitted_at, 1) if message.deadline else None) == has_s

    on_node(url, tmp_path, test)


def test_a_function_submits_calls_within_the_limits_of_the_called_functions_team(url: str, tmp_path: Path) -> None:
    async def test(node: Node) -> None:
        team = Team(name="ads", owns=("prod/ads/*",), limits=TeamLimits(queued=2))
        await node.teams.put(team.name, encode(team))
        await node.deploy("prod/ads/child")
        await node.deploy("free")
        revision = await node.deploy("prod/ads/parent")
        worker = await node.worker(revision)
        node.invoke(revision, timeout_s=20.0)
        run, _ = await worker.run()
        answers = []
        for number, name in enumerate(("prod/ads/child",) * 3 + ("free",), start=1):
            worker.send(frames.Call(number, "submit", name, "", "application/json", "", None, run.attempt), b"{}")
            answer = (await worker.next())[0]
            assert isinstance(answer, frames.Answer)
            answers.append((answer.kind, answer.error and answer.error.code))
        done = (OutcomeKind.SUCCEEDED, None)
        assert answers == [done, done, (OutcomeKind.REJECTED, "rate_limited"), done]
        await node.teams.delete(team.name)

    on_node(url, tmp_path, test)


def test_the_calls_that_a_call_makes_are_of_its_trace_and_name_it(url: str, tmp_path: Path) -> None:
    async def test(node: Node) -> None:
        await node.deploy("child")
        revision = await node.deploy("parent")
        worker = await node.worker(revision)
        request = node.request(revision)._replace(deadline=0.0, trace=TRACE)
        parent = await call_records.submit(node.bus, request, now=node.clock.time())
        run, _ = await worker.run()
        assert run.trace == TRACE
        worker.send(call_of(run), b"{}")
        message = await queued(node)
        assert (message.parent, message.trace) == (parent.id, TRACE)
        worker.send(frames.Call(2, "submit", "child", "", "application/json", "", None, run.attempt), b"{}")
        submitted = (await worker.next())[1].decode()
        found = await call_records.read(node.bus, submitted)
        assert found is not None
        assert (found[0].parent, found[0].trace) == (parent.id, TRACE)

    on_node(url, tmp_path, test)


def test_a_cancelled_call_cancels_its_nested_calls(url: str, tmp_path: Path) -> None:
    async def test(node: Node) -> None:
        child = await node.deploy("child")
        revision = await node.deploy("parent")
        worker, childs = await node.worker(revision), await node.worker(child, "w-2")
        call = node.invoke(revision)
        run, _ = await worker.run()
        worker.send(call_of(run), b"{}")
        running, _ = await childs.run()
        call.cancel()
        assert (await worker.next())[0] == frames.Cancel(run.attempt)
        answer, _ = await worker.next()
        assert isinstance(answer, frames.Answer)
        assert (answer.call, answer.kind) == (1, OutcomeKind.CANCELLED)
        assert (await childs.next())[0] == frames.Cancel(running.attempt)
        worker.send(call_of(run, 2), b"{}")
        late, _ = await worker.next()
        assert isinstance(late, frames.Answer)
        assert (late.call, late.kind) == (2, OutcomeKind.CANCELLED)

    on_node(url, tmp_path, test)


def test_a_call_of_a_function_that_cannot_start_fails_with_its_error(url: str, tmp_path: Path) -> None:
    async def test(node: Node) -> None:
        await node.deploy("child")
        revision = await node.deploy("parent", concurrency=2)
        worker = await node.worker(revision)
        node.invoke(revision)
        run, _ = await worker.run()
        worker.send(call_of(run), b"{}")
        await queued(node)
        status = FunctionStatus(
            function="child",
            serving=1,
            workers=WorkerCounts(),
            start_error=ErrorInfo("function_start_failed", "No module named 'torch'"),
        )
        node.bus.publish(subjects.CONTROLLER_REPORT, encode(ControllerReport("c", 1, 0.0, (status,))))
        for number in (1, 2):  # the waiting one, and the next one at once
            answer, _ = await worker.next()
            assert isinstance(answer, frames.Answer)
            assert (answer.call, answer.kind, answer.error and answer.error.code) == (
                number,
                OutcomeKind.REJECTED,
                "function_start_failed",
            )
            assert answer.error is not None
            assert "child" in answer.error.message
            assert "'torch'" in answer.error.message
            worker.send(call_of(run, number + 1), b"{}")

    on_node(url, tmp_path, test)


def test_a_function_calls_another_through_its_socket(url: str, tmp_path: Path) -> None:
    async def test(node: Node) -> None:
        outer, inner = await node.deploy("outer"), await node.deploy("inner")
        outer_worker = await node.worker(outer, "w-1")
        inner_worker = await node.worker(inner, "w-2")
        call = node.invoke(outer)
        run, _ = await outer_worker.run()
        ask = frames.Call(7, "call", "inner", "", "application/json", "application/json", 10.0, run.attempt)
        outer_worker.send(ask, b'"deep"')
        await inner_worker.echo(1)
        frame, body = await outer_worker.next()
        assert frame == frames.Answer(7, OutcomeKind.SUCCEEDED, None, "application/json")
        outer_worker.answer(run, body)
        assert (await call.future)[1] == b'"deep"'

    on_node(url, tmp_path, test)


def test_a_stream_between_functions_waits_for_its_reader(url: str, tmp_path: Path) -> None:
    async def test(node: Node) -> None:
        outer, inner = await node.deploy("reader"), await node.deploy("writer", kind=CallKind.GENERATOR)
        reader = await node.worker(outer, "w-1")
        writer = await node.worker(inner, "w-2")
        call = node.invoke(outer)
        run, _ = await reader.run()
        reader.send(frames.Call(1, "stream", "writer", "", "application/json", "", 10.0, run.attempt), b"{}")
        written, _ = await writer.run()

        async def write(count: int) -> None:
            credit = written.credits
            for number in range(count):
                while credit == 0:
                    frame, _ = await writer.next()
                    assert isinstance(frame, frames.Credit)
                    credit += frame.items
                writer.send(frames.Item(written.attempt, "application/json"), b"%d" % number)
                credit -= 1
            writer.send(frames.Result(written.attempt, OutcomeKind.SUCCEEDED, None, "", 0.1))

        writing = asyncio.create_task(write(400))
        items: list[int] = []
        for _ in range(STREAM_WINDOW):
            frame, body = await reader.next()
            assert isinstance(frame, frames.AnswerItem)
            items.append(int(body))
        await node.bus.flush()
        assert not writing.done(), "without a reader, at most two windows of items may be on the way"
        reader.send(frames.CallCredit(1, STREAM_WINDOW))
        while True:
            frame, body = await reader.next()
            if isinstance(frame, frames.Answer):
                break
            items.append(int(body))
            reader.send(frames.CallCredit(1, 1))
        assert items == list(range(400))
        await writing
        reader.answer(run)
        await call.future

    on_node(url, tmp_path, test)


def test_a_function_that_waits_for_itself_is_reported_as_such(url: str, tmp_path: Path) -> None:
    async def test(node: Node) -> None:
        revision = await node.deploy("child")
        worker = await node.worker(revision)
        node.invoke(revision)
        run, _ = await worker.run()
        worker.send(call_of(run), b"{}")
        while (told := await node.report_of("w-1", WorkerState.READY)).waits_for_own == 0:
            pass
        assert (told.in_use, told.waits_for_own, told.longest_call) == (1, 1, run.invocation)
        worker.send(frames.CloseCall(1))
        while (await node.report_of("w-1", WorkerState.READY)).waits_for_own:
            pass

    on_node(url, tmp_path, test)


def test_a_call_of_a_function_that_does_not_exist_is_answered_with_the_reason(url: str, tmp_path: Path) -> None:
    async def test(node: Node) -> None:
        revision = await node.deploy("lonely")
        worker = await node.worker(revision)
        worker.send(frames.Call(1, "call", "nobody"))
        frame, _ = await worker.next()
        assert isinstance(frame, frames.Answer)
        assert frame.error is not None
        assert frame.error.code == "function_not_found"

    on_node(url, tmp_path, test)


def test_a_call_closed_before_it_has_begun_is_answered(url: str, tmp_path: Path) -> None:
    async def test(node: Node) -> None:
        await node.deploy("child")
        revision = await node.deploy("parent")
        worker = await node.worker(revision)
        node.invoke(revision)
        run, _ = await worker.run()
        for number in range(1, 1101):  # more calls than a worker may have open
            worker.send_raw(frames.encode(call_of(run, number), b"{}") + frames.encode(frames.CloseCall(number)))
            answer, _ = await worker.next()
            assert isinstance(answer, frames.Answer)
            assert (answer.call, answer.kind) == (number, OutcomeKind.CANCELLED)

    on_node(url, tmp_path, test)


def test_the_nested_calls_of_a_worker_that_is_killed_end_with_it(url: str, tmp_path: Path) -> None:
    async def test(node: Node) -> None:
        outer = await node.deploy("impatient", timeout_s=0.1)
        inner = await node.deploy("callee", kind=CallKind.ASYNC)
        asking = await node.worker(outer, "w-1")
        asked = await node.worker(inner, "w-2")
        call = node.invoke(outer)
        run, _ = await asking.run()
        asking.send(frames.Call(1, "call", "callee", "", "application/json", "", 30.0, run.attempt), b"{}")
        running, _ = await asked.run()
        assert (await call.future)[0].kind is OutcomeKind.TIMED_OUT
        assert (await asked.next())[0] == frames.Cancel(running.attempt)

    on_node(url, tmp_path, test)


@pytest.mark.parametrize("verb", ["status", "result", "cancel"])
@pytest.mark.parametrize("target", ["*", ">", "", "01k9xq3zr7c8m2v5t0w4y6b1d3.>"])
def test_a_worker_refers_to_calls_only_by_their_ids(url: str, tmp_path: Path, verb: str, target: str) -> None:
    """A wildcard gave access to other callers' calls: their results and cancellation."""

    async def test(node: Node) -> None:
        revision = await node.deploy("curious")
        others = await node.deploy("others")
        await node.submit(others)
        worker = await node.worker(revision)
        worker.send(frames.Call(1, verb, target, timeout_s=0.1))
        answer, _ = await worker.next()
        assert isinstance(answer, frames.Answer)
        assert answer.error is not None
        assert answer.error.code == "invocation_not_found"

    on_node(url, tmp_path, test)


@pytest.mark.parametrize("verb", ["call", "stream", "submit"])
def test_a_function_sends_no_pickle_to_another_app(url: str, tmp_path: Path, verb: str) -> None:
    """A function ran code in a worker of another team, and read its secrets."""

    async def test(node: Node) -> None:
        await node.deploy("prod/ads/child", pickle=True)
        worker = await node.worker(await node.deploy("prod/search/parent", pickle=True))
        worker.send(frames.Call(1, frames.Verb(verb), "prod/ads/child", "", media.PICKLED, "", 1.0, 0), b"\x80")
        answer, _ = await worker.next()
        assert isinstance(answer, frames.Answer)
        assert answer.error is not None
        assert answer.error.code == "forbidden"

    on_node(url, tmp_path, test)


def test_a_function_gets_a_kept_result_of_any_size(url: str, tmp_path: Path) -> None:
    """Bodies that did not fit in one frame were refused."""

    async def test(node: Node) -> None:
        await large_bodies.ensure_buckets(node.bus)
        worker = await node.worker(await node.deploy("eager"))
        call = await node.submit(await node.deploy("bulky"))
        (path := tmp_path / "result").write_bytes(LARGE)
        digest, size = await object_store.keep_file(node.bus, subjects.RESULT_FILES, path, owner=call.id, ttl_s=60)
        kept = msgspec.structs.replace(
            call, state=InvocationState.SUCCEEDED, ended_at=1.0, content_type="x/large", blob=digest, size=size
        )
        assert await call_records.end(node.bus, kept)
        worker.send(frames.Call(1, "result", call.id))
        answer, body = await worker.next()
        assert isinstance(answer, frames.Answer)
        assert (answer.error, answer.content_type, body) == (None, "x/large", b"")
        assert bytes(shared_bodies_of(node).take(answer.shared_body)) == LARGE

    on_node(url, tmp_path, test)


def test_a_function_calls_another_one_with_a_large_body_and_gets_one(url: str, tmp_path: Path) -> None:
    async def test(node: Node) -> None:
        await large_bodies.ensure_buckets(node.bus)
        asking = await node.worker(await node.deploy("asking"), "w-1")
        asked = await node.worker(await node.deploy("asked"), "w-2")
        sent = shared_bodies_of(node).write([LARGE])
        asking.send(frames.Call(1, "call", "asked", content_type="x/y", timeout_s=30.0, shared_body=sent))
        run, body = await asked.run()
        assert body == b""
        assert bytes(shared_bodies_of(node, "w-2").take(run.shared_body)) == LARGE
        result = shared_bodies_of(node, "w-2").write([LARGE[::-1]])
        asked.send(frames.Result(run.attempt, OutcomeKind.SUCCEEDED, None, "x/z", 0.0, result))
        answer, body = await asking.next()
        assert isinstance(answer, frames.Answer)
        assert (answer.error, answer.content_type, body) == (None, "x/z", b"")
        assert bytes(shared_bodies_of(node).take(answer.shared_body)) == LARGE[::-1]
        while await stored_arguments(node):
            pass
        for folder in ("w-1", "w-2", "kept", "r-r1"):
            assert not list((node.home.shared_bodies / folder).glob("*")), folder

    on_node(url, tmp_path, test)


def test_a_large_body_submitted_by_a_function_is_removed_when_the_call_has_ended(url: str, tmp_path: Path) -> None:
    async def test(node: Node) -> None:
        await large_bodies.ensure_buckets(node.bus)
        asking = await node.worker(await node.deploy("submitting"), "w-1")
        revision = await node.deploy("submitted")
        asking.send(
            frames.Call(1, "submit", "submitted", content_type="x/y", shared_body=shared_bodies_of(node).write([LARGE]))
        )
        answer, invocation = await asking.next()
        assert isinstance(answer, frames.Answer)
        assert answer.error is None
        assert [blob.size for blob in await object_store.blobs(node.bus, subjects.ARGUMENT_FILES)] == [len(LARGE)]
        asked = await node.worker(revision, "w-2")
        run, _ = await asked.run()
        assert bytes(shared_bodies_of(node, "w-2").take(run.shared_body)) == LARGE
        asked.answer(run)
        record, _ = await call_records.wait(node.bus, invocation.decode(), 20)
        assert record.state is InvocationState.SUCCEEDED
        while await stored_arguments(node):
            pass

    on_node(url, tmp_path, test)


@pytest.mark.parametrize("claim", ["../../../etc/passwd", "0" * 26])
@pytest.mark.parametrize("verb", ["call", "submit", "stream"])
def test_arguments_that_a_worker_makes_up_are_refused(url: str, tmp_path: Path, verb: str, claim: str) -> None:
    async def test(node: Node) -> None:
        await node.deploy("target")
        worker = await node.worker(await node.deploy("inventing"))
        worker.send(frames.Call(1, verb, "target", timeout_s=5.0, shared_body=claim))
        answer, _ = await worker.next()
        assert isinstance(answer, frames.Answer)
        assert answer.error is not None
        assert answer.error.code == "invalid_input"

    on_node(url, tmp_path, test)


def shared_bodies_of(node: Node, worker: str = "w-1") -> SharedBodies:
    return SharedBodies(node.home.shared_bodies / worker)


async def stored_arguments(node: Node) -> dict[str, int]:
    return await streams.messages_per_subject(node.bus, f"OBJ_{subjects.ARGUMENT_FILES}")


def test_a_function_waits_for_a_result_for_hours_and_while_the_bus_is_away(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After an hour it received a timeout error although it had no timeout."""
    wait, turn_waits = call_records.wait, list[float]()

    async def away_at_first(bus: Bus, invocation: str, timeout_s: float) -> tuple[CallRecord, bytes]:
        turn_waits.append(timeout_s)
        if len(turn_waits) < 3:
            raise BusUnavailable("away")
        return await wait(bus, invocation, timeout_s)

    monkeypatch.setattr(call_records, "wait", away_at_first)

    async def test(node: Node) -> None:
        worker = await node.worker(await node.deploy("parent"))
        call = await node.submit(await node.deploy("child"))
        worker.send(frames.Call(1, "result", call.id))
        await until_async(lambda: turn_waits)  # a call that has ended before would need no wait
        kept = msgspec.structs.replace(call, state=InvocationState.SUCCEEDED, ended_at=1.0, content_type="x/kept")
        assert await call_records.end(node.bus, kept, b"at last")
        answer, body = await worker.next()
        assert isinstance(answer, frames.Answer)
        assert (answer.kind, answer.content_type, body) == (OutcomeKind.SUCCEEDED, "x/kept", b"at last")
        assert (round(turn_waits[0]), len(turn_waits)) == (LONGEST_TIMEOUT_S, 3)

    on_node(url, tmp_path, test)


@pytest.fixture
def bus_is_away(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Make the first calls of `child` fail, as if the bus were away: as many as the returned number."""
    times = [0]
    make = Caller._publish

    def publish(self: Caller, call: PendingCall, message: InvocationMessage, body: bytes) -> None:
        if message.function == "child" and times[0]:
            times[0] -= 1
            raise BusUnavailable("away")
        make(self, call, message, body)

    monkeypatch.setattr(Caller, "_publish", publish)
    return times


@pytest.mark.parametrize("verb", ["call", "stream"])
def test_a_call_that_a_function_makes_waits_while_the_bus_is_away(
    url: str, tmp_path: Path, bus_is_away: list[int], verb: str
) -> None:
    bus_is_away[0] = 2

    async def test(node: Node) -> None:
        await node.deploy("child", kind=CallKind.GENERATOR if verb == "stream" else CallKind.SYNC)
        revision = await node.deploy("parent")
        worker = await node.worker(revision)
        node.invoke(revision)
        run, _ = await worker.run()
        worker.send(msgspec.structs.replace(call_of(run), verb=frames.Verb(verb)), b"{}")
        assert (await queued(node)).stream is (verb == "stream")

    on_node(url, tmp_path, test)
    assert bus_is_away == [0]


def test_a_call_that_a_function_makes_is_retryable_when_the_bus_stays_away(
    url: str, tmp_path: Path, bus_is_away: list[int]
) -> None:
    bus_is_away[0] = 1_000_000

    async def test(node: Node) -> None:
        await node.deploy("child")
        revision = await node.deploy("parent")
        worker = await node.worker(revision)
        node.invoke(revision)
        run, _ = await worker.run()
        worker.send(call_of(run, timeout_s=1.5), b"{}")
        answer, _ = await worker.next()
        assert isinstance(answer, frames.Answer)
        assert answer.error is not None
        assert (answer.error.code, answer.error.retryable) == ("bus_unavailable", True)

    on_node(url, tmp_path, test)
    assert bus_is_away[0] < 1_000_000 - 1, "it was tried again"


def test_a_worker_gets_no_additional_items_by_false_read_reports() -> None:
    async def scenario() -> None:
        window = _Window()
        window.credit(1000)
        for _ in range(STREAM_WINDOW):
            await window.room_for(1)
        waiting = asyncio.ensure_future(window.room_for(1))
        await asyncio.sleep(0)
        assert not waiting.done()
        window.credit(1)
        await waiting

    asyncio.run(scenario())
