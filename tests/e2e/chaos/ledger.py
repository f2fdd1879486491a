"""Starts that functions recorded, compared with the attempt numbers of the platform."""

from __future__ import annotations

import itertools
import json
import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FORGOTTEN_S = 0.25  # 100 ms, and the time from a delivery to its start


@dataclass
class Start:
    """One start of user code. `ended_at` is infinite if the code did not finish."""

    number: int
    call: str
    attempt: int
    process: str
    at: float
    ended_at: float = math.inf

    def __str__(self) -> str:
        return f"{self.call}: attempt {self.attempt} in {self.process}, {self.at:.3f} to {self.ended_at:.3f}"


def read(path: Path) -> list[Start]:
    """Return the recorded starts in the order of the file."""
    found: list[Start] = []
    open_: dict[tuple[str, int, str], Start] = {}
    for line in map(json.loads, path.read_text().splitlines()):
        key = line["call"], line["attempt"], line["process"]
        if line["what"] == "start":
            start = open_[key] = Start(line["number"], line["call"], line["attempt"], line["process"], line["at"])
            found.append(start)
        else:
            open_[key].ended_at = line["at"]
    return found


def by_call(starts: Iterable[Start]) -> dict[str, list[Start]]:
    found: defaultdict[str, list[Start]] = defaultdict(list)
    for start in starts:
        found[start.call].append(start)
    return found


def twice_numbered(starts: Iterable[Start], bus_killed_at: Collection[float]) -> list[str]:
    """Return starts of one call with the same attempt number.

    A killed nats-server may lose the deliveries of its last 100 ms. A start after such a delivery may repeat its number
    (decision 0033).
    """
    found: defaultdict[tuple[str, int], list[Start]] = defaultdict(list)
    for start in starts:
        found[start.call, start.attempt].append(start)

    def is_forgotten(start: Start) -> bool:
        return any(abs(killed_at - start.at) < FORGOTTEN_S for killed_at in bus_killed_at)

    return [
        "\n    and ".join(map(str, each))
        for each in found.values()
        if not all(is_forgotten(start) for start in each[:-1])
    ]


def out_of_order(starts: Iterable[Start]) -> list[str]:
    """Return starts whose number is not greater than the number of an earlier start."""
    return [
        f"{before}\n    then {after}"
        for each in by_call(starts).values()
        for before, after in itertools.pairwise(each)
        if after.attempt <= before.attempt
    ]


def overlapping(starts: Iterable[Start]) -> list[str]:
    """Return pairs of runs of one call that overlapped: the first run finished after the second had started."""
    return [
        f"{before}\n    and {after}"
        for each in by_call(starts).values()
        for before, after in itertools.combinations(each, 2)
        if math.isfinite(before.ended_at) and after.at < before.ended_at
    ]


def unrecorded(starts: list[Start], records: Mapping[str, dict[str, Any]]) -> list[str]:
    """Return starts that are missing in the record of their call."""
    listed = {call: {each["number"] for each in record["attempts"]} for call, record in records.items()}
    return [str(start) for start in starts if start.call in listed and start.attempt not in listed[start.call]]


def misrecorded(starts: list[Start], records: Mapping[str, dict[str, Any]]) -> list[str]:
    """Return recorded attempts that finished but have no start in the ledger, and attempt numbers that do not grow."""
    written = {(start.call, start.attempt) for start in starts}
    wrong = []
    for call, record in records.items():
        numbers = [each["number"] for each in record["attempts"]]
        if numbers != sorted(set(numbers)):
            wrong.append(f"{call}: its record lists attempts {numbers}")
        wrong += [
            f"{call}: attempt {each['number']} {each['outcome']}, and no start of it"
            for each in record["attempts"]
            if each["outcome"] in ("succeeded", "raised") and (call, each["number"]) not in written
        ]
    return wrong
