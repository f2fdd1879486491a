"""A worker that its runner parks and resumes, and the memory that it moves."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from gpufn_core.domain.worker import Cause, ParkedMemory
from gpufn_core.protocol.frames import Drain, Hello, NotParked, Park, Ready, Resume, StartFailed
from gpufn_runtime.worker.gpu import parking
from gpufn_runtime.worker.gpu.parking import CannotPark, Parking
from tests.runtime.worker.fake_torch import FakeTorch

Start = Any
ROOM = 1 << 30
SOURCE = """
import os
from gpufn import park, resume

class F:
    def __init__(self):
        self.device, self.host, self.times = "weights", None, 0

    @park
    def out(self):
        print("parks")
        self.device, self.host = None, self.device

    @resume
    async def back(self, cause):
        self.device, self.host = self.host, None
        self.times += cause == "capacity"

    def call(self):
        return [self.device, self.times]
"""


@pytest.fixture
def worker(start: Start) -> Any:
    return start(SOURCE, "F", methods={"call": "sync"})


def _parked(worker: Any) -> ParkedMemory:
    worker.send(Park(ROOM))
    ready, _ = worker.next()
    assert isinstance(ready, Ready)
    assert ready.parked is not None
    return ready.parked


def _resumed(worker: Any) -> None:
    worker.send(Resume(Cause.CAPACITY))
    ready, _ = worker.next()
    assert isinstance(ready, Ready)
    assert ready.parked is None


def test_a_class_with_hooks_is_parked_and_resumed_again_and_again(worker: Any) -> None:
    assert worker.call(method="call") == b'["weights",0]'
    for times in (1, 2):
        assert _parked(worker).device_bytes == 0
        _resumed(worker)
        assert worker.call(method="call") == f'["weights",{times}]'.encode()
    assert worker.logs == [(0, "stdout", "parks")] * 2


def test_it_is_parked_while_its_user_thread_reads_the_socket(worker: Any) -> None:
    for _ in range(50):  # short calls: the socket is lent
        worker.call(method="call")
    _parked(worker)
    _resumed(worker)
    assert worker.call(method="call") == b'["weights",1]'


def test_a_parked_worker_reports_to_a_new_runner_that_it_is_parked(worker: Any) -> None:
    _parked(worker)
    worker.hang_up()
    worker.listen()
    hello = worker.accept()
    assert isinstance(hello, Hello)
    assert hello.was_ready
    ready, _ = worker.next()
    assert isinstance(ready, Ready)
    assert ready.parked is not None
    _resumed(worker)
    assert worker.call(method="call") == b'["weights",1]'


def test_a_parked_worker_ends_when_it_is_drained(worker: Any) -> None:
    _parked(worker)
    worker.send(Drain())
    assert worker.wait() == 0


def test_a_plain_function_without_anything_on_a_gpu_is_not_parked_and_continues(start: Start) -> None:
    worker = start("def f(): return 1")
    worker.send(Park(ROOM))
    answer, _ = worker.next()
    assert isinstance(answer, NotParked)
    assert "@park and @resume" in answer.error.message
    assert worker.call() == b"1"


def test_a_hook_that_raises_is_reported_with_its_traceback(start: Start) -> None:
    worker = start(SOURCE.replace('print("parks")', "1 / 0"), "F", methods={"call": "sync"})
    worker.send(Park(ROOM))
    answer, _ = worker.next()
    assert isinstance(answer, NotParked)
    assert answer.error.message == "division by zero"
    assert 'File "app.py"' in str(answer.error.traceback)


def test_a_worker_that_cannot_be_resumed_reports_the_reason_and_ends(start: Start) -> None:
    worker = start(SOURCE.replace('self.times += cause == "capacity"', "1 / 0"), "F", methods={"call": "sync"})
    _parked(worker)
    worker.send(Resume())
    failed, _ = worker.next()
    assert isinstance(failed, StartFailed)
    assert (failed.phase, failed.error.message) == ("resume", "division by zero")
    assert worker.wait() == 3


def test_hooks_that_use_more_host_memory_than_available_fail_the_park(start: Start) -> None:
    grows = SOURCE.replace('print("parks")', "self.grown = b'1' * (20 << 20)")
    worker = start(grows, "F", methods={"call": "sync"})
    worker.send(Park(1 << 20))
    answer, _ = worker.next()
    assert isinstance(answer, NotParked)
    assert "only 1 MiB remain" in answer.error.message
    assert answer.needs_bytes >= 20 << 20


# --- the memory that moves --------------------------------------------------------------------------------------------


class FakeSession:
    def __init__(self, told: list[str], *, on_gpu: bool = True, parked_bytes: int = 1000) -> None:
        self.told = told
        self.engine = self
        self.manifest = SimpleNamespace(backend=SimpleNamespace(on_gpu=on_gpu))
        self.parked_bytes = parked_bytes

    def park(self) -> None:
        self.told.append("session parks")

    def resume(self) -> None:
        self.told.append("session resumes")


def _parking(memory_bytes: int | None = None, **loaded: Any) -> Parking:
    given: dict[str, Any] = {"park": [], "resume": [], "sessions": {}} | loaded
    call: Callable[[Callable[[], Any]], None] = lambda hook: hook()  # noqa: E731
    return Parking(SimpleNamespace(**given), call, memory_bytes)  # type: ignore[arg-type]


def test_gpu_sessions_are_moved_beside_the_objects_of_hooks_and_return_first() -> None:
    told: list[str] = []
    made = _parking(
        park=[lambda cause: told.append(f"parks: {cause}")],
        resume=[lambda cause: told.append(f"resumes: {cause}")],
        sessions={"a": FakeSession(told), "b": FakeSession(told, on_gpu=False)},
    )
    assert made.park(ROOM, "idle").host_bytes >= 1000
    made.resume("calls")
    assert told == ["parks: idle", "session parks", "session resumes", "resumes: calls"]


def test_torch_is_moved_unless_the_class_does_it_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = FakeTorch()
    monkeypatch.setitem(sys.modules, "torch", torch)
    weights = torch.Tensor(b"weights")
    made = _parking()
    assert made.park(ROOM, "idle") == ParkedMemory(512, 0)
    made.resume("calls")
    made = _parking(park=[lambda _: None], resume=[lambda _: None])
    assert made.park(ROOM, "idle").device_bytes == len(weights.content) == 7


def test_objects_that_torch_cannot_move_are_not_parked(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = FakeTorch()
    torch.stray = 1 << 30
    monkeypatch.setitem(sys.modules, "torch", torch)
    with pytest.raises(CannotPark, match=r"torch has 1 GiB .*: give its class @park and @resume"):
        _parking().park(ROOM, "idle")


@pytest.mark.parametrize(
    ("host_bytes", "memory_bytes", "needs_bytes", "message"),
    [
        (1 << 20, None, 3 << 20, "takes 3 MiB of host memory, but only 1 MiB remain for parked workers"),
        (ROOM, 12 << 20, 0, r"takes 3 MiB of host memory, but only 2 MiB of its limit remain: increase memory=\.\.\."),
    ],
)
def test_parking_above_the_host_memory_is_not_begun(
    host_bytes: int, memory_bytes: int | None, needs_bytes: int, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parking, "resident_bytes", lambda: 10 << 20)
    told: list[str] = []
    made = _parking(memory_bytes, sessions={"a": FakeSession(told, parked_bytes=3 << 20)})
    with pytest.raises(CannotPark, match=message) as caught:
        made.park(host_bytes, "idle")
    assert (caught.value.needs_bytes, told) == (needs_bytes, [])
