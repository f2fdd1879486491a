from __future__ import annotations

from gpufn_platform.secrets.redaction import Redactor, patterns_of
from gpufn_runtime.agent.workers.output import OutputLog


def test_lines_are_complete_at_any_cut() -> None:
    log = OutputLog(0.0)
    assert log.feed(b"one\ntw", 0.0) == ["one"]
    assert log.feed(b"o\r\n\nthr", 0.0) == ["two", ""]
    assert log.flush(0.5, older_than_s=1.0) == []
    assert log.flush(2.0, older_than_s=1.0) == ["thr"]
    assert log.feed(b"\xff\n", 2.0) == ["\ufffd"]
    assert log.tail() == "one\ntwo\n\nthr\ufffd".replace("\r", "") or log.tail().startswith("one")


def test_of_a_line_that_draws_over_itself_the_last_state_is_left() -> None:
    log = OutputLog(0.0)
    assert log.feed(b"copy: 0%\rcopy: 50%\rcopy: 100%\r\nnext\n", 0.0) == ["copy: 100%", "next"]
    assert log.tail() == "copy: 100%\nnext"


def test_a_line_without_end_is_cut_into_pieces() -> None:
    log = OutputLog(0.0)
    assert [len(line) for line in log.feed(b"x" * 20_000, 0.0)] == [8192, 8192]
    assert [len(line) for line in log.flush(0.0)] == [20_000 - 2 * 8192]


def test_a_flood_is_dropped_and_counted_and_logging_resumes() -> None:
    log = OutputLog(0.0)
    block = (b"y" * 99 + b"\n") * 600
    kept = sum(len(log.feed(block, 0.0)) for _ in range(1000))
    assert kept <= (1 << 20) // 199 + 1
    assert log.feed(b"quiet\n", 0.01) == []
    note, line = log.feed(b"again\n", 10.0)
    assert note.endswith("128 KiB/s]")
    assert line == "again"
    total = 1000 * len(block) + len(b"quiet\n")
    assert note.startswith(f"[gpufn: {total - kept * 100:,} bytes ")


def test_the_tail_is_the_last_forty_lines_or_eight_kibibytes() -> None:
    log = OutputLog(0.0)
    log.feed(b"".join(b"%d\n" % number for number in range(100)), 0.0)
    assert log.tail().split("\n") == [str(number) for number in range(60, 100)]
    log.feed(b"z" * 100_000, 0.0)
    assert log.tail() == "z" * 8192


def test_secrets_are_masked_in_lines_and_tail_in_any_split() -> None:
    log = OutputLog(0.0, Redactor(patterns_of(["swordfish"])))
    lines = [line for part in (b"a sword", b"fish b\n", b"sword") for line in log.feed(part, 0.0)]
    assert lines == ["a [redacted] b"]
    assert log.flush(0.5, older_than_s=1.0) == []
    assert log.flush(1.0, older_than_s=1.0) == ["sword"]
    assert log.tail() == "a [redacted] b\nsword"
