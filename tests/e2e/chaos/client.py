"""One client of the platform: its connections, its retries, and a record of its requests and responses."""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.conftest import http_client

_TIMEOUT_S = 15.0
_LONGEST_PAUSE_S = 1.0
BALLAST = "x" * (300 << 10)  # large enough to travel by reference


@dataclass
class Call:
    """One call of a client. `number` is its argument; the function records it and returns it."""

    kind: str
    number: int
    id: str = ""  # set when the call is accepted; the platform then owes an outcome
    fails: str = ""  # "once": at its first attempt; "always": at every attempt
    is_large: bool = False  # its arguments and its result contain BALLAST
    has_webhook: bool = False
    is_cancelled: bool = False  # as the response to a DELETE reports
    ended_at: float | None = None  # from the same response
    answers: list[Any] = field(default_factory=list)  # results in the order of their arrival
    notes: list[str] = field(default_factory=list)

    def result(self, body: Any) -> Any:
        """Return the result of the function without the ballast."""
        return body[0] if self.is_large and body[1:] == [BALLAST] else body

    def note(self, what: str) -> None:
        self.notes.append(f"{time.monotonic():.2f} {what}")

    def __str__(self) -> str:
        return f"{self.kind} {self.number} ({self.id or 'no id'}):\n    " + "\n    ".join(self.notes)


class Stopped(Exception):
    """The clients stop before this call was accepted."""


class Client:
    """The connections of one client. Each request goes to a random gateway."""

    def __init__(self, urls: list[str], dice: random.Random, stop: threading.Event) -> None:
        self._clients = [http_client(url, timeout_s=_TIMEOUT_S) for url in urls]
        self.dice = dice
        self.stop = stop

    def close(self) -> None:
        for client in self._clients:
            client.close()

    def once(self, call: Call, method: str, path: str, **request: Any) -> httpx.Response | None:
        """Send a request. Return its response, or None if the connection broke or the response was late."""
        number = self.dice.randrange(len(self._clients))
        try:
            answer = self._clients[number].request(method, path, **request)
        except httpx.TransportError as error:
            call.note(f"{method} at {number}: {type(error).__name__}")
            self.stop.wait(0.05)
            return None
        call.note(f"{method} at {number}: {answer.status_code} {answer.text[:300]}")
        return answer

    def insist(self, call: Call, method: str, path: str, *, may_stop: bool = True, **request: Any) -> httpx.Response:
        """Repeat a request until it succeeds or fails with an error that is not retryable. Raises Stopped."""
        while True:
            answer = self.once(call, method, path, **request)
            if answer is not None:
                if answer.status_code < 400 or not answer.json().get("retryable"):
                    return answer
                self.pause(answer)
            if may_stop and self.stop.is_set():
                raise Stopped

    def pause(self, answer: httpx.Response) -> None:
        self.stop.wait(min(float(answer.headers.get("retry-after", 0.1)), _LONGEST_PAUSE_S))

    def lines(self, call: Call, path: str, query: dict[str, str]) -> Iterator[str]:
        """Yield the lines of a response until it ends or the connection breaks."""
        number = self.dice.randrange(len(self._clients))
        try:
            with self._clients[number].stream("GET", path, params=query) as answer:
                if answer.status_code != 200:
                    call.note(f"GET at {number}: {answer.status_code} {answer.read().decode()[:300]}")
                    self.pause(answer)
                    return
                yield from answer.iter_lines()
            call.note(f"GET at {number}: its end")
        except httpx.TransportError as error:
            call.note(f"GET at {number}: {type(error).__name__}")
            self.stop.wait(0.05)

    def items(self, call: Call, path: str, body: dict[str, Any]) -> tuple[list[int], str]:
        """Return the items of a stream and its end: `end`, the code of an error, or "" for a broken connection."""
        number = self.dice.randrange(len(self._clients))
        seen: list[int] = []
        event = ""
        try:
            with self._clients[number].stream(
                "POST", path, json=body, headers={"accept": "text/event-stream"}
            ) as answer:
                if answer.status_code != 200:
                    call.note(f"refused: {answer.read().decode()}")
                    self.pause(answer)
                    return seen, answer.json()["code"]
                for line in answer.iter_lines():
                    if self.stop.is_set():
                        break
                    if line.startswith("event: "):
                        event = line.removeprefix("event: ")
                    elif line.startswith("data: ") and event == "item":
                        seen.append(json.loads(line.removeprefix("data: ")))
                    elif line.startswith("data: "):
                        call.note(line)
                        said = json.loads(line.removeprefix("data: "))
                        return seen, said["code"] if event == "error" else event
        except httpx.TransportError as error:
            call.note(f"at {number}: {type(error).__name__}")
            self.stop.wait(0.05)
        return seen, ""
