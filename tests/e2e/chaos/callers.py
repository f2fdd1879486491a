"""Clients that keep calling during faults, follow the platform's rules for retries, and record every response.

    a broken connection, or no response in time   retry a call with an id or a key; the fate of other calls is unknown
    a problem that is `retryable`                 retry after `Retry-After`
    any other problem                             the end of the call; the verdict judges it

Each accepted call (202, or a response with an id) is recorded as a Call with all of its responses.
"""

from __future__ import annotations

import itertools
import json
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gpufn_core.ids import digest_of, invocation_id_for, new_invocation_id
from tests.builder.bench import scaled
from tests.e2e.chaos.client import BALLAST, Call, Client, Stopped

_PAUSE_S = 0.03  # between short calls: ten clients keep calls running and waiting at any time
_CHUNK = 10  # items of a map
_LARGE = 0.1  # of the calls
_ENDS_OF_STREAMS = {"", "end", "worker_lost", "bus_unavailable", "platform_stopping"}


class Callers:
    """A thread for each kind of client. Functions write to the file `runs`; `webhook` receives the ends of calls."""

    def __init__(self, urls: list[str], runs: Path, seed: int, webhook: str) -> None:
        self._urls = urls
        self._webhook = webhook
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
            self.schedule,
            self.build,
        )
        self._threads = [
            threading.Thread(target=self._run, args=(kind, index), name=f"{kind.__name__} {index}", daemon=True)
            for index, kind in enumerate(kinds)
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self, within_s: float) -> None:
        """Stop the clients. Each client finishes its current call first."""
        self._stop.set()
        give_up = time.monotonic() + within_s
        for thread in self._threads:
            thread.join(max(0.0, give_up - time.monotonic()))
            if thread.is_alive():
                self.wrong.append(f"the client '{thread.name}' did not end")

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

    def _new(self, kind: str, **more: Any) -> Call:
        call = Call(kind, next(self._numbers), **more)
        self.calls.append(call)
        return call

    def _body(self, call: Call, **more: Any) -> dict[str, Any]:
        body = {"path": self._runs, "number": call.number, **more}
        if call.fails:
            body["fails"] = call.fails
        if call.is_large:
            body["ballast"] = BALLAST
        return body

    # --- kinds of clients ---------------------------------------------------------------------------------------------

    def submit(self, client: Client) -> None:
        """Submit a call with a client-chosen id or a key. Retry until it is accepted, and sometimes repeat it."""
        dice = client.dice
        call = self._new(
            "submit",
            fails=dice.choice(("",) * 8 + ("once", "always")),
            is_large=dice.random() < _LARGE,
            has_webhook=dice.random() < 0.5,
        )
        body = self._body(call, seconds=dice.choice((0.0, 0.0, 0.01, 0.1)))
        headers = {"x-gpufn-webhook": self._webhook} if call.has_webhook else {}
        if dice.random() < 0.5:
            method, path = "PUT", f"/v1/functions/mark/invocations/{new_invocation_id()}"
        else:
            method, path = "POST", "/v1/functions/mark/submit"
            headers["idempotency-key"] = f"{self._seed} {call.number}"
        for _ in range(dice.choice((1, 1, 1, 2))):
            accepted = client.insist(call, method, path, json=body, headers=headers)
            if accepted.status_code != 202:
                self.wrong.append(f"refused for good: {accepted.text}\n{call}")
                return
            self._set_id(call, accepted.json()["id"])
        client.stop.wait(_PAUSE_S)

    def _set_id(self, call: Call, id_: str) -> None:
        if call.id not in ("", id_):
            self.wrong.append(f"the repeat has another id, {id_}: {call}")
        call.id = id_

    def invoke(self, client: Client) -> None:
        """Invoke once. A call whose connection breaks is lost, and may have run."""
        call = self._new("invoke", is_large=client.dice.random() < _LARGE)
        body = self._body(call, seconds=client.dice.choice((0.0, 0.0, 0.01, 0.1)))
        answer = client.once(call, "POST", "/v1/functions/mark/invoke", json=body)
        if answer is None:
            return
        if answer.status_code == 200:
            if call.result(answer.json()) != call.number:
                self.wrong.append(f"a wrong answer to {call}")
            client.stop.wait(_PAUSE_S)
        elif not answer.json().get("retryable"):
            self.wrong.append(f"refused for good: {answer.text}\n{call}")
        else:
            client.pause(answer)

    def invoke_by_key(self, client: Client) -> None:
        """Invoke several times with one key, at any gateway: all requests belong to one call with one outcome."""
        call = self._new("invoke by key")
        key = {"idempotency-key": f"{self._seed} {call.number}"}
        body = self._body(call, seconds=client.dice.choice((0.0, 0.05, 0.2)))
        for _ in range(2):
            answer = client.insist(call, "POST", "/v1/functions/mark/invoke", json=body, headers=key)
            self._set_id(call, answer.headers.get("x-gpufn-invocation", call.id))
            if answer.status_code != 200:
                self.wrong.append(f"refused for good: {answer.text}\n{call}")
                return
            call.answers.append(answer.json())

    def stream(self, client: Client) -> None:
        """Read a stream. Items arrive in order and without gaps; a stream that ends normally has all items."""
        call = self._new("stream")
        count = client.dice.choice((10, 100, 300))
        seen, end = client.items(call, "/v1/functions/series/invoke", self._body(call, count=count))
        if seen != list(range(len(seen))) or (end == "end" and len(seen) != count) or end not in _ENDS_OF_STREAMS:
            self.wrong.append(f"{len(seen)} items of {count} and then {end}: {seen}\n{call}")
        call.note(f"{len(seen)} items of {count}, then {end or 'the connection broke'}")

    def cancel(self, client: Client) -> None:
        """Submit a long call, and cancel it while it waits, while it runs, or after its end."""
        if client.dice.random() < 0.2:
            self._cancel_map(client)
            return
        call = self._new("cancel")
        body = self._body(call, seconds=client.dice.choice((0.0, 0.3, 30.0)))
        accepted = client.insist(call, "PUT", f"/v1/functions/nap/invocations/{new_invocation_id()}", json=body)
        if accepted.status_code != 202:
            self.wrong.append(f"refused for good: {accepted.text}\n{call}")
            return
        call.id = accepted.json()["id"]
        client.stop.wait(client.dice.choice((0.0, 0.2, 0.5)))
        # Even when the clients stop: the verdict would wait half a minute for a call that is not cancelled.
        answer = client.insist(call, "DELETE", f"/v1/invocations/{call.id}", may_stop=False)
        if answer.status_code != 200:
            self.wrong.append(f"cannot be cancelled: {answer.text}\n{call}")
        else:
            call.is_cancelled, call.ended_at = answer.json()["cancelled"], answer.json()["ended_at"]

    def _cancel_map(self, client: Client) -> None:
        """Cancel a map whose items would run for longer than their timeout."""
        whole, own = self._new("map"), new_invocation_id()
        items = [self._new("cancel") for _ in range(_CHUNK)]
        body = "\n".join(json.dumps(self._body(item, seconds=300.0)) for item in items)
        chunk = f"/v1/functions/nap/maps/{own}/items/0"
        lines = {"content-type": "application/x-ndjson"}
        answer = client.insist(whole, "PUT", chunk, may_stop=False, content=body, headers=lines)
        if answer.status_code != 202:
            self.wrong.append(f"refused for good: {answer.text}\n{whole}")
            return
        for index, item in enumerate(items):
            item.id = f"{own}-{index}"
        client.stop.wait(client.dice.choice((0.0, 0.3)))
        answer = client.insist(whole, "DELETE", f"/v1/maps/{own}", may_stop=False)
        if answer.status_code != 200:
            self.wrong.append(f"cannot be cancelled: {answer.text}\n{whole}")

    def schedule(self, client: Client) -> None:
        """Schedule one call in a second. Its client computes the id of the call."""
        call = self._new("schedule")
        wanted = {"function": "mark", "in_s": 1.0, "arguments": self._body(call)}
        answer = client.once(call, "POST", "/v1/schedules", json=wanted)
        if answer is None:
            return
        if answer.status_code == 201:
            made = answer.json()
            if made["next_at"] is not None:  # None: its gateway was stopped, and the schedule is over
                call.id = invocation_id_for("mark", f"schedule {made['id']}", f"{made['next_at']:.0f}")
            client.stop.wait(0.2)
        elif not answer.json().get("retryable"):
            self.wrong.append(f"refused for good: {answer.text}\n{call}")
        else:
            client.pause(answer)

    def build(self, client: Client) -> None:
        """Build a new model, and wait for its engine."""
        call = self._new("build")
        model = scaled(call.number).SerializeToString()
        digest = digest_of(model)
        client.insist(call, "PUT", f"/v1/artifacts/{digest}", content=model)
        file = {"name": "model.onnx", "digest": digest, "size": len(model)}
        wanted = {"model": {"parameter": "net", "files": [file]}}
        begun = client.insist(call, "POST", "/v1/builds", json=wanted)
        if begun.status_code != 202:
            self.wrong.append(f"refused for good: {begun.text}\n{call}")
            return
        build = begun.json()
        while build["state"] in {"pending", "building"}:
            build = client.insist(call, "GET", f"/v1/builds/{build['id']}?wait=1").json()
        if build["state"] != "succeeded":
            self.wrong.append(f"not built: {build}\n{call}")

    def map(self, client: Client) -> None:
        """Send chunks of items, and retry each until it is accepted. Then read outcomes, and resume at the cursor."""
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
                    continue  # a keep-alive
                end = json.loads(line)
                cursor = end["cursor"]
                items[end["index"]].note(f"came: {line}")
                items[end["index"]].answers.append(end.get("result"))
        if any(len(item.answers) > 1 for item in items):
            self.wrong.append("an end came twice\n" + "\n".join(map(str, [whole, *items])))
