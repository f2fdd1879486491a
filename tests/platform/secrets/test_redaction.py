"""Redaction of secrets: the forms of a value, and any split of the output."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpufn_platform.secrets.redaction import MASK, Redactor, patterns_of, redact

SECRET = 'hf_Ab9+/"x\nÄ9'
TEXTS = st.text("abé\n", min_size=4, max_size=9)


def redacted(values: Sequence[str], *parts: bytes) -> bytes:
    redactor = Redactor(patterns_of(values))
    return b"".join([*map(redactor.feed, parts), redactor.flush()])


@pytest.mark.parametrize(
    "printed",
    [
        SECRET,
        repr(SECRET)[1:-1],
        json.dumps(SECRET)[1:-1],
        quote(SECRET, safe=""),
        base64.b64encode(SECRET.encode()).decode(),
        base64.urlsafe_b64encode(SECRET.encode()).decode(),
    ],
)
def test_a_value_is_masked_in_each_form(printed: str) -> None:
    masked = redact(patterns_of([SECRET]), f"token {printed} used")
    assert masked.startswith("token [redacted]")
    assert masked.endswith(" used")
    assert len(masked) <= len("token [redacted] used") + 3  # the last characters of base64 encode few bits


@pytest.mark.parametrize("before", ["", "u", "us", "use"])
def test_a_value_is_masked_in_base64_of_a_longer_text(before: str) -> None:
    value = "correct-horse-battery"
    text = base64.b64encode(f"{before}:{value}:more".encode()).decode()
    masked = redact(patterns_of([value]), text)
    assert "[redacted]" in masked
    shown = base64.b64decode(masked.partition("[redacted]")[0] + "==="[: -len(masked.partition("[")[0]) % 4])
    assert not shown.decode(errors="ignore").endswith("co")


@pytest.mark.parametrize(
    ("values", "output", "expected"),
    [
        (["abcd"], b"abcd", b"#"),
        (["abcd"], b"abcdabcd", b"#"),
        (["abcd"], b"abc", b"abc"),
        (["abcd"], b"abcabcd", b"abc#"),
        (["abcd", "abcdef"], b"-abcdef-", b"-#-"),
        (["abcd", "cdef"], b"-abcdef-", b"-#-"),
        (["aaaa"], b"aaaaaa.aaa", b"#.aaa"),
        (["abc"], b"abc", b"abc"),
        ([], b"abc", b"abc"),
    ],
)
def test_masks(values: list[str], output: bytes, expected: bytes) -> None:
    assert redacted(values, output).replace(MASK, b"#") == expected


@given(st.lists(TEXTS, min_size=1, max_size=3), st.lists(st.one_of(TEXTS, st.integers(0, 2)), max_size=12), st.data())
def test_any_split_yields_the_same_output_without_secrets(
    values: list[str], pieces: list[str | int], data: st.DataObject
) -> None:
    output = "".join(values[each % len(values)] if isinstance(each, int) else each for each in pieces).encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(output)), max_size=8)))
    parts = [output[start:end] for start, end in zip([0, *cuts], [*cuts, len(output)], strict=True)]
    whole = redacted(values, output)
    assert redacted(values, *parts) == whole
    assert not any(value.encode() in whole for value in values)


@given(st.text(max_size=30), st.integers(1, 9))
def test_at_most_the_length_of_the_longest_pattern_is_held_back(output: str, step: int) -> None:
    patterns = patterns_of(["0000111122223333"])
    redactor = Redactor(patterns)
    data, longest = output.encode(errors="replace"), max(len(pattern.text) for pattern in patterns)
    done = b""
    for at in range(0, len(data), step):
        done += redactor.feed(data[at : at + step])
        assert len(data[: at + step]) - len(done) < longest
    assert done + redactor.flush() == data


def test_output_that_cannot_start_a_secret_is_not_delayed() -> None:
    redactor = Redactor(patterns_of(["zebra"]))
    assert redactor.feed(b"a line\n") == b"a line\n"
    assert not redactor.is_holding
    assert redactor.feed(b"ze") == b""
    assert redactor.is_holding


@given(st.text("ab", min_size=4, max_size=40), st.text("ab", max_size=200), st.integers(1, 50))
def test_a_pattern_that_overlaps_itself_is_masked_wherever_it_occurs(value: str, output: str, step: int) -> None:
    text = (output + value + output).encode()
    covered = [False] * len(text)
    for pattern in patterns_of([value]):
        for at in range(len(text)):
            if text.startswith(pattern.text, at):
                covered[at : at + len(pattern.text)] = [True] * len(pattern.text)
    expected = b"".join(
        (b"" if at and covered[at - 1] else MASK) if is_covered else text[at : at + 1]
        for at, is_covered in enumerate(covered)
    )
    assert redacted([value], *(text[at : at + step] for at in range(0, len(text), step))) == expected


@pytest.mark.parametrize("value", ["a" * 65_536, "a" * 30_000 + "b" + "a" * 35_535, "ab" * 32_768])
def test_the_work_is_linear_for_a_value_that_a_worker_prints_to_block_its_agent(value: str) -> None:
    """Quadratic work on this output takes minutes."""
    redactor = Redactor(patterns_of([value]))
    for part in ("a", "ab", "b", "a"):
        for _ in range(20):
            redactor.feed(part.encode() * (65_536 // len(part)))


def test_a_value_that_overlaps_itself_partly_is_masked_at_each_occurrence() -> None:
    """`abaa` occurs again three bytes later, though its double repeats after four."""
    for step in range(1, 12):
        text = b"xabaabaax"
        assert redacted(["abaa"], *(text[at : at + step] for at in range(0, len(text), step))) == b"x" + MASK + b"x"


@pytest.mark.parametrize("value", ["ab" * 40 + "c", "a" * 60 + "b", "abaab" * 12 + "b"])
def test_a_secret_whose_start_repeats_is_held_until_it_is_complete(value: str) -> None:
    text = (value[:-1] * 2 + value).encode()
    for step in (1, 7, 30, 64, 100):
        output = redacted([value], *(text[at : at + step] for at in range(0, len(text), step)))
        assert output == text[: -len(value)] + MASK
