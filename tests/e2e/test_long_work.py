"""Long work on the whole platform, while processes are killed: checkpoints, webhooks, schedules."""

from __future__ import annotations

import http.server
import json
import os
import queue
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpufn import webhooks
from tests.conftest import Platform, running_platform

pytestmark = pytest.mark.e2e

APP = Path(__file__).parent / "apps" / "climb.py"


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Platform]:
    allowed = {"GPUFN_WEBHOOK_NETWORKS": "127.0.0.0/8"}
    with running_platform(tmp_path_factory.mktemp("long") / "home", environ=allowed) as platform:
        platform.gpufn("deploy", APP)
        yield platform


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    server = Receiver()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


class Receiver(http.server.ThreadingHTTPServer):
    """Keeps what it is sent; refuses so many at first."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.heard: queue.Queue[tuple[dict[str, str], bytes]] = queue.Queue()
        self.refuses = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/done"


class _Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        server: Any = self.server
        body = self.rfile.read(int(self.headers["content-length"]))
        server.heard.put((dict(self.headers), body))
        server.refuses -= 1
        self.send_response(503 if server.refuses >= 0 else 200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None: ...


def submit(platform: Platform, gate: Path, **headers: str) -> str:
    body = {"steps": 6, "stop_at": 3, "gate": str(gate)}
    answer = platform.client.post("/v1/functions/climb/submit", json=body, headers=headers)
    assert answer.status_code == 202, answer.text
    return str(answer.json()["id"])


def wait_at_the_gate(platform: Platform, invocation: str, attempt: int = 1) -> None:
    for _ in range(3000):
        status = platform.client.get(f"/v1/invocations/{invocation}").json()
        if status["attempt"] >= attempt and (status["progress"] or {}).get("message") == "at the gate":
            assert status["progress"]["fraction"] == 0.5
            return
        time.sleep(0.01)
    pytest.fail(f"it never came to the gate: {status}")


def told_processes(platform: Platform) -> list[dict[str, Any]]:
    for _ in range(3000):
        (node,) = platform.client.get("/v1/nodes").json()["nodes"]
        if found := node["processes"]:
            return list(found)
        time.sleep(0.01)
    pytest.fail("the node tells of no process")


def pid_of(platform: Platform, name: str) -> int:
    if name == "worker":
        return int(told_processes(platform)[0]["pid"])
    return int(json.loads((platform.home / "up.json").read_bytes())["pids"][name])


@pytest.mark.parametrize(("victim", "attempts"), [("worker", [1, 1, 1, 2, 2, 2]), ("runner", None)])
def test_after_kill_9_a_call_goes_on_from_its_checkpoint(
    own: Platform, tmp_path: Path, victim: str, attempts: list[int] | None
) -> None:
    gate = tmp_path / "gate"
    invocation = submit(own, gate)
    wait_at_the_gate(own, invocation)
    os.kill(pid_of(own, victim), signal.SIGKILL)
    if victim == "worker":
        wait_at_the_gate(own, invocation, attempt=2)
    gate.touch()
    answer = own.client.get(f"/v1/invocations/{invocation}/result", params={"wait": 60}, timeout=90)
    assert answer.status_code == 200, answer.text
    steps = answer.json()
    assert len(steps) == 6  # none of the first three was made again
    assert attempts in (None, steps)


def test_a_webhook_survives_kill_9_of_the_gateway(own: Platform, tmp_path: Path, receiver: Receiver) -> None:
    secret = own.gpufn("keys", "webhook-secret").strip()
    gate = tmp_path / "gate"
    invocation = submit(own, gate, **{"x-gpufn-webhook": receiver.url})
    wait_at_the_gate(own, invocation)
    receiver.refuses = 1
    gate.touch()
    first, _ = receiver.heard.get(timeout=30)  # refused: the next is in 5 s
    os.kill(pid_of(own, "gateway"), signal.SIGKILL)
    headers, body = receiver.heard.get(timeout=60)
    webhooks.verify(secret, headers, body)
    assert headers["webhook-id"] == first["webhook-id"] == invocation
    assert json.loads(body)["data"]["result"] == [1] * 6


def test_a_delayed_call_is_made_by_itself_also_after_kill_9_of_the_gateway(own: Platform, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    gate.touch()
    before = {call["id"] for call in json.loads(own.gpufn("calls", "climb", "--json"))}
    arguments = json.dumps({"steps": 2, "stop_at": 1, "gate": str(gate)})
    assert own.gpufn("schedules", "add", "climb", arguments, "--in", "3s").startswith("climb.")
    os.kill(pid_of(own, "gateway"), signal.SIGKILL)
    states: list[str] = []
    for _ in range(600):
        listed = own.try_gpufn("calls", "climb", "--json")
        calls = json.loads(listed.stdout) if listed.returncode == 0 else []
        if (states := [call["state"] for call in calls if call["id"] not in before]) == ["succeeded"]:
            break
        time.sleep(0.1)
    assert states == ["succeeded"]
    assert json.loads(own.gpufn("schedules", "ls", "--json")) == []
