"""Folded stacks: limits, the printed table, and the file for speedscope."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gpufn_core.domain.profiles.stacks import OTHERS, parse, shortened, speedscope, top

TEXT = "main (a.py:1);work (a.py:5) 6\nmain (a.py:1);work (a.py:7) 2\nmain (a.py:1);wait (b.py) 2\nnative 0\n"


def test_the_lines_of_a_function_count_together() -> None:
    rows = {row.frame: (row.own, row.total) for row in top(parse(TEXT), 10)}
    assert rows == {
        "work (a.py)": (0.8, 0.8),
        "wait (b.py)": (0.2, 0.2),
        "native": (0.0, 0.0),
    } | {frame: rows[frame] for frame in rows if frame == "main (a.py)"}
    assert top([], 5) == []


def test_a_recursive_function_counts_once() -> None:
    (row,) = top(parse("f (a.py:1);f (a.py:2);f (a.py:1) 5"), 5)
    assert (row.own, row.total) == (1.0, 1.0)


def test_the_file_for_speedscope() -> None:
    file = speedscope(parse(TEXT), "place", rate=100)
    (profile,) = file["profiles"]
    assert profile["weights"] == [0.06, 0.02, 0.02, 0.0]
    assert file["shared"]["frames"][profile["samples"][0][1]] == {"name": "work", "file": "a.py", "line": 5}
    assert file["shared"]["frames"][profile["samples"][2][1]] == {"name": "wait", "file": "b.py"}
    assert profile["endValue"] == sum(profile["weights"])


@given(st.text())
def test_any_text_is_read(text: str) -> None:
    stacks = parse(text)
    top(stacks, 3)
    speedscope(stacks, "any", rate=100)


@given(st.lists(st.tuples(st.text("abc;", min_size=1), st.integers(1, 99))), st.integers(0, 60))
def test_no_sample_is_lost_when_stacks_are_left_out(rows: list[tuple[str, int]], most: int) -> None:
    text = "".join(f"{frames} {samples}\n" for frames, samples in rows)
    kept = shortened(text, most)
    assert sum(stack.samples for stack in parse(kept)) == sum(stack.samples for stack in parse(text))
    assert len(kept) <= most + len(f"{OTHERS} \n") + 6


def test_a_hostile_profile_takes_linear_time_and_bounded_numbers() -> None:
    """Bug: a frame of 48 KB took 20 s of the gateway's event loop, and a long number was an internal error."""
    text = f"{'a (' * 100_000} 5\nf (x.py:{'1' * 5_000}) 2\ng {'1' * 5_000}\nh 0\n"
    stacks = parse(text)
    assert [stack.samples for stack in stacks] == [5, 2, 0]
    frames = speedscope(stacks, "f", rate=None)["shared"]["frames"]
    assert [len(frame["name"]) for frame in frames] == [300_000, 1, 1]
    assert [row.own for row in top(stacks, 5)] == [5 / 7, 2 / 7, 0.0]
    assert [row.own for row in top(parse("h 0\n"), 5)] == [0.0]
    assert shortened(text, 10) == "(other stacks) 7\n"
