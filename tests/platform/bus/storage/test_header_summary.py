"""The listed summary of a record is small, whatever the record contains."""

from __future__ import annotations

from typing import Any

import pytest

from gpufn_core.domain.invocation import InvocationState
from gpufn_core.errors import ErrorInfo
from gpufn_core.protocol import subjects
from gpufn_core.protocol.records import DeadLetter
from gpufn_platform.bus.storage import streams
from gpufn_platform.bus.storage.header_summary import newest, summary, summary_of
from gpufn_platform.bus.storage.ordered_reader import StoredMessage

HEADERS_BYTES = 64 << 10  # the server's limit for headers
LONG = "x" * (1 << 20)


@pytest.mark.parametrize(
    "fields",
    [
        {"accept": LONG},
        {"method": LONG},
        {"content_type": LONG},
        {"error": ErrorInfo("function_raised", LONG)},
        {"accept": LONG, "method": LONG, "content_type": LONG, "error": ErrorInfo(LONG, LONG, traceback=LONG)},
    ],
)
def test_a_summary_cuts_long_texts_in_any_field(fields: dict[str, Any]) -> None:
    given: dict[str, Any] = {"id": "1" * 26, "function": "f", "revision": 1, "method": "m", "content_type": "a/b"}
    given |= {"accept": "a/b", "state": InvocationState.FAILED, "submitted_at": 1.0, "died_at": 2.0}
    headers = summary(DeadLetter(**given | fields))
    assert sum(len(name) + len(text) for name, text in headers.items()) < HEADERS_BYTES
    told = summary_of(DeadLetter)(StoredMessage("dlq", 1, b"", headers, 0.0))
    assert told is not None
    assert (told.id, told.function, told.died_at) == ("1" * 26, "f", 2.0)


async def test_a_search_with_few_matches_reads_each_record_once(nats: Any, connect: Any) -> None:
    """Regression: a thousand records are fast to read, a hundred thousand several times over were not."""
    bus = await connect(nats)
    await streams.ensure_streams(bus)
    letters = [
        DeadLetter(
            id=f"{number:026}", function="seen", revision=1, method="", content_type="", accept="",
            state=InvocationState.FAILED, submitted_at=1.0, died_at=2.0,
        )
        for number in range(1000)
    ]  # fmt: skip
    for letter in letters:
        bus.publish(subjects.dead_letter(letter.function, letter.id), b"", headers=summary(letter))
    await bus.flush()
    looked_at: list[str] = []

    def matches(letter: DeadLetter) -> bool:
        looked_at.append(letter.id)
        return letter.id in {letters[0].id, letters[-1].id}

    of_all, read = subjects.dead_letter("seen", "*"), summary_of(DeadLetter)
    found = await newest(bus, subjects.DEAD_LETTERS, of_all, read, limit=3, matches=matches)
    assert [letter.id for letter in found] == [letters[-1].id, letters[0].id]
    assert sorted(looked_at) == [letter.id for letter in letters]
