"""Clients that go on whatever happens to the platform, by the rules that it gives them, and write down what it says.

    a connection that breaks, or no answer in time   a call with an id or a key: again; else its fate is unknown
    a problem that is `retryable`                    again after `Retry-After`
    any other problem                                an end, and the verdict's to judge

What was accepted (202, or an id that was told) is kept as a Call with all that was heard of it.
"""

from __future__ import annotations

import itertools
import json
import random
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from gpufn.ids import new_invocation_id

_TIMEOUT_S = 15.0
_LONGEST_PAUSE_S = 1.0
_CHUNK = 10  # items of a map


@dataclass
class Call:
    """One thing that a client wanted: `number` is what it asked for, and what its function writes down."""

    kind: str
    number: int
    id: str = ""  # once it is known; the platform then owes an end
    is_cancelled: bool = False  # by a DELETE that said so
    answers: list[Any] = field(default_factory=list)  # results that came, as they came
    said: list[str] = field(default_factory=list)

    def note(self, what: str) -> None:
        self.said.append(f"{time.monotonic():.2f} {what}")

    def __str__(self) -> str:
        return f"{self.kind} {self.number} ({self.id or 'no id'}):\n    " + "\n    ".join(self.said)


class Stopped(Exception):
    """The clients were told to stop before this call was accepted."""


class Callers:
    """A thread for each kind of client. `runs` is the file that the functions write to."""

    def __init__(self, urls: list[str], runs: Path, seed: int) -> None:
        self._urls = urls
        self._runs = str(runs)
        self._seed = seed
        self._numbers = itertools.count(1)
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self.calls: list[Call] = []
        self.wrong: list[str] = []
        kinds = (
            self.submit,
            self.submit,
            self.invoke,
            self.invoke,
            self.invoke_by_key,
            self.stream,
            self.cancel,
            self.map,
        )
        self._threads = [
            threading.Thread(target=self._run, args=(kind, index), name=f"{kind.__name__} {index}", daemon=True)
            for index, kind in enumerate(kinds)
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self, within_s: float) -> None:
        """When it is told that no more is wanted, a client finishes what it is at."""
        self._stop.set()
        give_up = time.monotonic() + within_s
        for thread in self._threads:
            thread.join(max(0.0, give_up - time.monotonic()))
            if thread.is_alive():
                self.wrong.append(f"the client '{thread.name}' did not come back")

    def _run(self, kind: Callable[[Client], None], index: int) -> None:
        client = Client(self._urls, random.Random(f"{self._seed} {index}"), self._stop)
        try:
            while not self._stop.is_set():
                kind(client)
        except Stopped:
            pass
        except Exception as error:
            self.wrong.append(f"the client '{kind.__name__} {index}' failed: {error!r}")
            raise
        finally:
            client.close()

    def _new(self, kind: str) -> Call:
        call = Call(kind, next(self._numbers))
        self.calls.append(call)
        return call

    def _body(self, call: Call, **more: Any) -> dict[str, Any]:
        return {"path": self._runs, "number": call.number, **more}

    # --- what they do -------------------------------------------------------------------------------------------------

    def submit(self, client: Client) -> None:
        """Under an id of its own, or with a key; again until it is accepted."""
        call = self._new("submit")
        body = self._body(call, seconds=client.dice.choice((0.0, 0.0, 0.01, 0.1)))
        if client.dice.random() < 0.5:
            own = new_invocation_id()
            accepted = client.insist(call, "PUT", f"/v1/functions/mark/invocations/{own}", json=body)
        else:
            key = {"idempotency-key": f"{self._seed} {call.number}"}
            accepted = client.insist(call, "POST", "/v1/functions/mark/submit", json=body, headers=key)
        if accepted.status_code != 202:
            self.wrong.append(f"refused for good: {accepted.text}\n{call}")
            return
        call.id = accepted.json()["id"]
        client.stop.wait(0.01)

    def invoke(self, client: Client) -> None:
        """Once: what breaks is lost, and may have run."""
        call = self._new("invoke")
        body = self._body(call, seconds=client.dice.choice((0.0, 0.0, 0.01, 0.1)))
        answer = client.once(call, "POST", "/v1/functions/mark/invoke", json=body)
        if answer is None:
            return
        if answer.status_code == 200:
            call.answers.append(answer.json())
        elif not answer.json().get("retryable"):
            self.wrong.append(f"refused for good: {answer.text}\n{call}")
        else:
            client.pause(answer)

    def invoke_by_key(self, client: Client) -> None:
        """Again and again with one key, wherever: it is one call, with one outcome."""
        call = self._new("invoke by key")
        key = {"idempotency-key": f"{self._seed} {call.number}"}
        body = self._body(call, seconds=client.dice.choice((0.0, 0.05, 0.2)))
        for _ in range(2):
            answer = client.insist(call, "POST", "/v1/functions/mark/invoke", json=body, headers=key)
            call.id = answer.headers.get("x-gpufn-invocation", call.id)
            if answer.status_code != 200:
                self.wrong.append(f"refused for good: {answer.text}\n{call}")
                return
            call.answers.append(answer.json())

    def stream(self, client: Client) -> None:
        """Items come in order and none is missing, as far as they come; and all of them when it says so."""
        call = self._new("stream")
        count = client.dice.choice((10, 100, 300))
        seen, end = client.items(call, "/v1/functions/series/invoke", self._body(call, count=count))
        if seen != list(range(len(seen))) or (end == "end" and len(seen) != count):
            self.wrong.append(f"{len(seen)} items of {count} and then {end}: {seen}\n{call}")
        call.note(f"{len(seen)} items of {count}, then {end or 'the connection broke'}")

    def cancel(self, client: Client) -> None:
        """Submit one that takes long, and cancel it: while it waits, while it runs, or when it has ended."""
        call = self._new("cancel")
        body = self._body(call, seconds=client.dice.choice((0.0, 0.3, 30.0)))
        accepted = client.insist(call, "PUT", f"/v1/functions/nap/invocations/{new_invocation_id()}", json=body)
        if accepted.status_code != 202:
            self.wrong.append(f"refused for good: {accepted.text}\n{call}")
            return
        call.id = accepted.json()["id"]
        client.stop.wait(client.dice.choice((0.0, 0.2, 0.5)))
        # Also when the clients are to stop: one that sleeps for half a minute would be waited for.
        answer = client.insist(call, "DELETE", f"/v1/invocations/{call.id}", may_stop=False)
        if answer.status_code != 200:
            self.wrong.append(f"cannot be cancelled: {answer.text}\n{call}")
        else:
            call.is_cancelled = answer.json()["cancelled"]

    def map(self, client: Client) -> None:
        """Chunks of items, each again until it is accepted; then their ends, going on behind the last one that came."""
        whole = self._new("map")
        own = new_invocation_id()
        items = [self._new("map item") for _ in range(2 * _CHUNK)]
        for first in (0, _CHUNK):
            body = "\n".join(json.dumps(self._body(item)) for item in items[first : first + _CHUNK])
            chunk = f"/v1/functions/mark/maps/{own}/items/{first}?last={'true' if first else 'false'}"
            answer = client.insist(whole, "PUT", chunk, content=body, headers={"content-type": "application/x-ndjson"})
            if answer.status_code != 202:
                self.wrong.append(f"refused for good: {answer.text}\n{whole}")
                return
            for index in range(first, first + _CHUNK):
                items[index].id = f"{own}-{index}"
        cursor = ""
        while any(not item.answers for item in items) and not client.stop.is_set():
            for line in client.lines(whole, f"/v1/maps/{own}/outcomes", {"after": cursor} if cursor else {}):
                if client.stop.is_set():
                    break
                if not line:
                    continue  # a sign of life
                end = json.loads(line)
                cursor = end["cursor"]
                items[end["index"]].note(f"came: {line}")
                items[end["index"]].answers.append(end.get("result"))
        if any(len(item.answers) > 1 for item in items):
            self.wrong.append("an end came twice\n" + "\n".join(map(str, [whole, *items])))


class Client:
    """One client's connections: each request goes to any of the gateways."""

    def __init__(self, urls: list[str], dice: random.Random, stop: threading.Event) -> None:
        self._clients = [httpx.Client(base_url=url, timeout=_TIMEOUT_S) for url in urls]
        self.dice = dice
        self.stop = stop

    def close(self) -> None:
        for client in self._clients:
            client.close()

    def once(self, call: Call, method: str, path: str, **request: Any) -> httpx.Response | None:
        """The answer; None when the connection broke, or nothing came in time."""
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
        """Until there is an answer that no repeat would change. Raises Stopped."""
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
        """Those of an answer, until it ends or the connection breaks."""
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
        """What a stream brought, and the event that ended it: `end`, `error`, or nothing."""
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
                    return seen, "error"
                for line in answer.iter_lines():
                    if self.stop.is_set():
                        break
                    if line.startswith("event: "):
                        event = line.removeprefix("event: ")
                    elif line.startswith("data: ") and event == "item":
                        seen.append(json.loads(line.removeprefix("data: ")))
                    elif line.startswith("data: "):
                        call.note(line)
                        return seen, event
        except httpx.TransportError as error:
            call.note(f"at {number}: {type(error).__name__}")
            self.stop.wait(0.05)
        return seen, ""
