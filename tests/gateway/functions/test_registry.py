from __future__ import annotations

from typing import Any

import msgspec
import pytest

from gpufn_core.domain.revision import Check, CheckState, Function, Lease, RevisionState
from gpufn_core.domain.traffic import Split
from gpufn_core.errors import ErrorInfo, FunctionNotFound, PlatformError, RevisionNotFound
from gpufn_core.protocol.codec import encode
from gpufn_gateway.functions.registry import ARRIVES_WITHIN_S, CONTROLLER_FRESH_S
from gpufn_platform.bus.storage.key_value import Entry

CANNOT_START = "embed cannot start: ModuleNotFoundError: No module named 'torch' (`gpufn logs embed` has the traceback)"
BROKEN = ErrorInfo(
    "function_raised", "No module named 'torch'", error_type="ModuleNotFoundError", traceback="Traceback ..."
)


def record(name: str, serving: int, *, latest: int = 1) -> bytes:
    return encode(Function(name=name, active=serving, serving=serving, latest=latest, updated_at=0.0))


def test_a_name_is_looked_up_once(gateway: Any) -> None:
    assert gateway.registry.resolve("embed") is gateway.registry.resolve("embed")
    assert gateway.registry.resolve("EMBED").name == "embed"


def test_a_new_serving_revision_receives_calls_at_once(gateway: Any, make: Any) -> None:
    assert gateway.registry.resolve("embed").number == 1
    gateway.deploy(make.spec(), 2)
    assert gateway.registry.resolve("embed").number == 2


def test_a_function_may_be_known_before_its_revision(gateway: Any) -> None:
    gateway.registry.on_function("new", Entry("new", record("new", 4), 60))
    with pytest.raises(PlatformError, match="new@4") as caught:
        gateway.registry.resolve("new")
    assert caught.value.retryable


def test_a_revision_that_never_arrives_is_lost_and_its_callers_receive_the_next_step(gateway: Any, make: Any) -> None:
    gateway.registry.on_function("two", Entry("two", record("two", 1), 60))
    gateway.clock.now += ARRIVES_WITHIN_S + 1
    with pytest.raises(RevisionNotFound, match=r"two@1.* deploy two again") as caught:
        gateway.registry.resolve("two")
    assert not caught.value.retryable
    gateway.deploy(make.spec("two"), 2)
    assert gateway.registry.resolve("two").number == 2


def test_a_short_name_means_the_deployed_function_beside_a_served_one(gateway: Any, make: Any) -> None:
    gateway.deploy(make.spec("prod/shop/twice"), 1)
    gateway.deploy(make.spec("dev-ada/shop/twice"), 1)
    name = "dev-ada/shop/twice"
    served = Function(name=name, active=1, serving=1, latest=1, updated_at=0.0, lease=Lease("1", 30.0))
    gateway.registry.on_function(name, Entry(name, encode(served), 61))
    assert gateway.registry.resolve("twice").name == "prod/shop/twice"


def test_a_deleted_function_disappears_and_is_reported_once(gateway: Any) -> None:
    told: list[str] = []
    gateway.registry.on_deleted.append(told.append)
    gateway.registry.resolve("embed")
    gateway.registry.on_function("embed", None)
    gateway.registry.on_function("embed", None)
    with pytest.raises(FunctionNotFound):
        gateway.registry.resolve("embed")
    assert (told, gateway.registry.statuses.get("embed")) == (["embed"], None)


def test_spellings_do_not_fill_the_memory(gateway: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpufn_gateway.functions.registry._MAX_SPELLINGS", 2)
    for name in ("embed", "EMBED", "_embed", "Embed", "eMbed"):
        assert gateway.registry.resolve(name).name == "embed"
    assert len(gateway.registry._targets) <= 2


def test_reports_of_a_controller_count_after_a_restart_of_its_bus(gateway: Any, make: Any) -> None:
    gateway.report(make.status("a", ready=2), epoch=70_000)
    gateway.clock.now += CONTROLLER_FRESH_S + 1
    gateway.report(make.status("a", ready=0), epoch=3)
    assert gateway.registry.has_fresh_controller_report()
    gateway.report(make.status("a", ready=1), epoch=2)
    assert gateway.registry.statuses.get("a").workers.ready == 0


def test_reports_replace_or_add(gateway: Any, make: Any) -> None:
    gateway.report(make.status("a"), make.status("b"))
    gateway.report(make.status("b", ready=3), partial=True)
    assert [gateway.registry.statuses.get(name).workers.ready for name in ("a", "b")] == [1, 3]
    gateway.report(make.status("b", ready=2))
    assert gateway.registry.statuses.get("a") is None


def test_reports_of_a_former_leader_are_ignored(gateway: Any, make: Any) -> None:
    gateway.report(make.status("a", ready=2), epoch=7)
    gateway.report(make.status("a", ready=0), epoch=6)
    assert gateway.registry.statuses.get("a").workers.ready == 2


def test_ready_workers_are_unknown_without_fresh_news_of_the_serving_revision(gateway: Any, make: Any) -> None:
    function = gateway.registry.functions["embed"]
    assert gateway.registry.ready_workers(function) == 1
    gateway.report(make.status(serving=2))
    assert gateway.registry.ready_workers(function) is None
    gateway.report(make.status(ready=0))
    assert gateway.registry.ready_workers(function) == 0
    gateway.clock.now += 6
    assert gateway.registry.ready_workers(function) is None


def test_an_open_circuit_ends_the_calls_that_wait(gateway: Any, make: Any) -> None:
    gateway.report(make.status(ready=1, start_error=BROKEN))
    assert gateway.queue.failed == []
    gateway.report(make.status(ready=0, start_error=BROKEN))
    ((function, number, error),) = gateway.queue.failed
    assert (function, number, error.message) == (
        "embed",
        1,
        CANNOT_START,
    )


async def test_an_open_circuit_refuses_new_calls(gateway: Any, make: Any, problem: Any) -> None:
    gateway.report(make.status(ready=0, start_error=BROKEN))
    answer = await gateway.post("/v1/functions/embed/invoke", b'{"texts":[]}')
    assert problem(answer) == (503, "function_start_failed")
    assert (answer.headers["retry-after"], gateway.queue.calls) == ("15", [])
    assert answer.json()["detail"] == CANNOT_START


def test_readiness_names_missing_preconditions(make: Any) -> None:
    gateway = make.Gateway(make.Clock())
    registry = gateway.registry
    reasons = [registry.why_not_ready()]
    registry.loaded = True
    reasons.append(registry.why_not_ready())
    gateway.report()
    reasons.append(registry.why_not_ready())
    gateway.hear_node()
    reasons.append(registry.why_not_ready())
    gateway.clock.now += 6
    reasons.append(registry.why_not_ready())
    assert reasons.pop(3) is None, "a node reports"
    missing = ("functions", "controller", "agent", "controller")
    assert all(name in (reason or "") for name, reason in zip(missing, reasons, strict=True))


def test_a_revision_gets_its_part_of_the_calls_once_its_check_has_passed(gateway: Any, make: Any) -> None:
    split = Split(weights={1: 50, 2: 50}, set_at=1.0)
    for number in (2, 1):
        gateway.deploy(make.spec(), number, traffic=split)
    assert {gateway.registry.resolve("embed").of(f"{key}").number for key in range(20)} == {1, 2}
    revision = gateway.registry.revision("embed", 2)
    for change, called in (
        ({"check": Check(CheckState.PENDING)}, {1}),
        ({"check": Check(CheckState.PASSED)}, {1, 2}),
        ({"state": RevisionState.FAILED}, {1}),
    ):
        record = msgspec.structs.replace(revision, **change)
        gateway.registry.on_revision("embed.2", Entry("embed.2", encode(record), 9))
        assert {gateway.registry.resolve("embed").of(f"{key}").number for key in range(20)} == called
