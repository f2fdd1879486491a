"""Copies of calls to the mirror of a split, with a stub of the queue."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from gpufn_core.domain.invocation import OutcomeKind
from gpufn_core.domain.traffic import Comparison, Mirror, MirroredCall, Split
from gpufn_core.errors import ErrorInfo
from gpufn_core.protocol import subjects
from gpufn_core.spec.priority import Priority
from gpufn_gateway.calls.mirrored_calls import MAX_DIFFERENCES, MirroredCalls

BODY = b'{"texts":["a"]}'
FAILED = ErrorInfo("function_raised", "no", error_type="ValueError")


@pytest.fixture
def compared(gateway: Any, make: Any, monkeypatch: pytest.MonkeyPatch) -> list[MirroredCall]:
    """The comparisons of the calls of `embed`, whose revision 2 is the mirror."""
    published: list[MirroredCall] = []

    def publish(subject: str, payload: bytes) -> None:
        if subject == subjects.mirrored_call("embed"):
            published.append(msgspec.msgpack.decode(payload, type=MirroredCall))

    monkeypatch.setattr(gateway.bus, "publish", publish)
    for number in (2, 1):
        gateway.deploy(make.spec(), number, traffic=Split(weights={1: 100}, set_at=1.0, mirror=Mirror(2)))
    return published


def answer(gateway: Any, copy: bytes | ErrorInfo, call: bytes | ErrorInfo = b"[1.0]") -> None:
    def reply(stub: Any) -> None:
        end = copy if stub.fields["revision"].number == 2 else call
        if isinstance(end, bytes):
            stub.reply(end)
        else:
            stub.reply(kind=OutcomeKind.RAISED, error=end)

    gateway.queue.answer = reply


@pytest.mark.parametrize(
    ("call", "copy", "comparison"),
    [
        (b"[1.0]", b"[1.0000001]", Comparison.EQUAL),
        (b"[1.0]", b"[1.5]", Comparison.DIFFERENT),
        (b"[1.0]", FAILED, Comparison.FAILED),
        (FAILED, b"[1.0]", Comparison.DIFFERENT),
        (FAILED, FAILED, Comparison.EQUAL),
    ],
)
async def test_the_copy_of_a_call_is_compared_and_not_returned(
    gateway: Any, settle: Any, compared: list[MirroredCall], *, call: Any, copy: Any, comparison: Comparison
) -> None:
    answer(gateway, copy, call)
    response = await gateway.post("/v1/functions/embed/invoke", BODY)
    await settle()
    assert (response.status_code, response.headers["x-gpufn-revision"]) == (500 if call is FAILED else 200, "embed@1")
    (one,) = compared
    assert (one.comparison, one.revision, one.split_at) == (comparison, 2, 1.0)
    assert (one.difference is None) is (comparison is Comparison.EQUAL)
    copied = gateway.queue.calls[-1].fields
    assert (copied["body"], copied["priority"], copied["owner"]) == (BODY, Priority.LOW, subjects.PLATFORM)


async def test_a_copy_that_cannot_be_queued_is_skipped(gateway: Any, settle: Any, compared: list[MirroredCall]) -> None:
    gateway.queue.answer = lambda stub: stub.fields["revision"].number == 1 and stub.reply(b"[1.0]")
    for _ in range(70):
        assert (await gateway.post("/v1/functions/embed/invoke", BODY)).status_code == 200
    await settle()
    assert [one.comparison for one in compared] == [Comparison.SKIPPED] * 6  # 64 copies run at a time


async def test_a_call_of_the_mirror_itself_is_not_copied(
    gateway: Any, make: Any, settle: Any, compared: list[MirroredCall]
) -> None:
    for number in (2, 1):
        gateway.deploy(make.spec(), number, traffic=Split(weights={2: 100}, set_at=1.0, mirror=Mirror(2)))
    answer(gateway, b"[1.0]")
    assert (await gateway.post("/v1/functions/embed/invoke", BODY)).headers["x-gpufn-revision"] == "embed@2"
    await settle()
    assert (len(gateway.queue.calls), compared) == (1, [])


def test_a_new_split_resets_the_counts_and_differences_are_bounded(gateway: Any) -> None:
    calls = MirroredCalls(gateway.registry)
    assert (calls.counts("f"), calls.differences("f")) == (None, [])

    def add(split_at: float, comparison: Comparison, count: int) -> None:
        for number in range(count):
            difference = None
            if comparison is Comparison.DIFFERENT:
                difference = {"at": 1.0, "invocation": f"i-{number}", "comparison": comparison}
                difference |= {"path": "", "answer": "1", "copy": "2"}
            fields = {"function": "f", "split_at": split_at, "revision": 2, "comparison": comparison}
            calls.add(
                msgspec.convert(fields | {"took_s": 0.1, "copy_took_s": 0.2, "difference": difference}, MirroredCall)
            )

    add(1.0, Comparison.EQUAL, 3)
    add(2.0, Comparison.DIFFERENT, MAX_DIFFERENCES + 1)
    add(1.0, Comparison.EQUAL, 3)  # late, from another gateway
    counts = calls.counts("f")
    assert counts is not None
    assert (counts.equal, counts.different) == (0, MAX_DIFFERENCES + 1)
    assert counts.p50_s == pytest.approx(0.1, rel=0.05)
    assert [each.invocation for each in calls.differences("f")][:1] == ["i-1"]
