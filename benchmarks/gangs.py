"""A gang of two nodes that runs torch.distributed with gloo. Three network namespaces are the machines: each has an
agent and a runner; nats-server and the gateway are outside. Measures starts, calls, an all_reduce, and the time until a
call that lost a rank or a node has gone on from its checkpoint. Needs root, `ip` and a CPU build of torch.

    python benchmarks/gangs.py
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx

import measure
from gpufn_core.protocol.limits import MESSAGE_BYTES
from gpufn_local.nats_process import find_binary

_NODES = ("a", "b", "c")
_PREFIX = "gpufn-"
_BRIDGE = "gpufn-br"
_OUTSIDE = "10.77.0.254"
_NATS = f"nats://{_OUTSIDE}:4222"
_STEP_S = 0.2
_WITHIN_S = 120.0


def main() -> None:
    options = measure.arguments("A gang on two of three network namespaces.", calls=200)
    about = measure.machine()
    with tempfile.TemporaryDirectory(prefix="gpufn-gangs-") as folder, _machines(), _platform(Path(folder)) as url:
        file = measure.HERE / "functions" / "gang.py"
        deploy = [sys.executable, "-m", "gpufn", "deploy", str(file), "--no-check"]
        subprocess.run(deploy, env=os.environ | {"GPUFN_URL": url}, check=True, stdout=subprocess.DEVNULL)
        with httpx.Client(base_url=url, timeout=_WITHIN_S) as http:
            result = _measured(http, Path(folder), int(options.calls))
    measure.write("gangs", result, measure.table(("what", "figure"), list(result.items())), about)


def _measured(http: httpx.Client, folder: Path, calls: int) -> dict[str, Any]:
    started = time.monotonic()
    _invoke(http, "reducer.noop")
    cold_s = time.monotonic() - started
    _invoke(http, "alone")
    reduced = [_invoke(http, "reducer.reduce", elements=1 << 18) for _ in range(20)]
    assert {each["sum"] for each in reduced} == {3.0}, reduced
    return {
        "start of the gang, with torch and init_process_group, s": round(cold_s, 2),
        "all_reduce of 1 MiB, median ms": round(sorted(each["ms"] for each in reduced)[10], 2),
        "call of the gang, p50 ms": _p50_ms(http, "reducer.noop", calls),
        "call of a function on one node, p50 ms": _p50_ms(http, "alone", calls),
        "rank 1 killed, until the call has ended, s": _lost(http, folder, 1, _kill),
        "rank 0 killed, until the call has ended, s": _lost(http, folder, 0, _kill),
        "node of rank 1 unplugged, until the call has ended, s": _lost(http, folder, 1, _unplug),
        "node of rank 0 unplugged, until the call has ended, s": _lost(http, folder, 0, _unplug),
    }


def _invoke(http: httpx.Client, function: str, **arguments: Any) -> Any:
    answer = http.post(f"/v1/functions/{function}/invoke", json=arguments)
    assert answer.is_success, answer.text
    return answer.json()


def _p50_ms(http: httpx.Client, function: str, calls: int) -> float:
    took = []
    for _ in range(calls):
        started = time.perf_counter()
        _invoke(http, function)
        took.append(time.perf_counter() - started)
    return round(1000 * sorted(took)[calls // 2], 2)


def _lost(http: httpx.Client, folder: Path, rank: int, lose: Callable[[int, str], None]) -> float:
    """Return the seconds from the loss of a rank until the call, which had 2 s left, has ended."""
    own = Path(tempfile.mkdtemp(dir=folder))
    steps = 20
    accepted = http.post(
        "/v1/functions/reducer.train/submit", json={"steps": steps, "step_s": _STEP_S, "folder": str(own)}
    ).json()
    pid_file = own / f"1-{rank}"
    _until(lambda: pid_file.exists() and pid_file.read_text() != "")
    pid = int(pid_file.read_text())
    time.sleep(steps * _STEP_S / 2)
    lost_at = time.monotonic()
    node = _node_of(pid)
    lose(pid, node)
    while (answer := http.get(f"/v1/invocations/{accepted['id']}/result?wait=30")).status_code == 202:
        assert time.monotonic() < lost_at + _WITHIN_S, "the call has not ended"
    took_s = time.monotonic() - lost_at
    assert answer.is_success, answer.text
    (first, then) = answer.json()["began"]
    assert (first, then > 0) == (0, True), answer.text
    _run("ip", "link", "set", f"veth-{node}", "up")
    _until(lambda: len(_reporting(http)) == len(_NODES))
    return round(took_s, 1)


def _kill(pid: int, _: str) -> None:
    os.kill(pid, signal.SIGKILL)


def _unplug(_: int, node: str) -> None:
    _run("ip", "link", "set", f"veth-{node}", "down")


def _node_of(pid: int) -> str:
    return next(
        node
        for node in _NODES
        if Path(f"/proc/{pid}/ns/net").stat().st_ino == Path(f"/var/run/netns/{_PREFIX}{node}").stat().st_ino
    )


def _reporting(http: httpx.Client) -> list[str]:
    return [each["node"] for each in http.get("/v1/nodes").json()["nodes"] if time.time() - each["sent_at"] < 3]


# ---- machines


@contextlib.contextmanager
def _machines() -> Iterator[None]:
    """Make a bridge and one network namespace per node, without a route to anywhere else."""
    with contextlib.ExitStack() as stack:
        _run("ip", "link", "add", "name", _BRIDGE, "type", "bridge")
        stack.callback(_run, "ip", "link", "del", _BRIDGE)
        _run("ip", "addr", "add", f"{_OUTSIDE}/24", "dev", _BRIDGE)
        _run("ip", "link", "set", _BRIDGE, "up")
        for number, node in enumerate(_NODES, 1):
            name = f"{_PREFIX}{node}"
            _run("ip", "netns", "add", name)
            stack.callback(_run, "ip", "netns", "del", name)
            _run("ip", "link", "add", f"veth-{node}", "type", "veth", "peer", "name", "eth0", "netns", name)
            _run("ip", "link", "set", f"veth-{node}", "master", _BRIDGE, "up")
            _run("ip", "-n", name, "addr", "add", f"10.77.0.{number}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                _run("ip", "-n", name, "link", "set", device, "up")
        yield


@contextlib.contextmanager
def _platform(folder: Path) -> Iterator[str]:
    """Run nats-server and a gateway outside of the namespaces, and an agent and a runner in each. Yields the gateway's
    address."""
    settings = f'listen: "{_OUTSIDE}:4222"\nmax_payload: {MESSAGE_BYTES}\nfeature_flags {{ js_ack_fc_v2: false }}\n'
    store = f'jetstream {{ store_dir: "{folder}/nats", max_memory_store: 1GB, max_file_store: 100GB }}\n'
    (folder / "nats.conf").write_text(settings + store)
    python = [sys.executable, "-P", "-m"]
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = str(probe.getsockname()[1])
    gateway = {"GPUFN_HOME": f"{folder}/g", "GPUFN_PORT": port}
    with contextlib.ExitStack() as stack:
        stack.enter_context(_process(folder, "nats", [str(find_binary()), "-c", f"{folder}/nats.conf"]))
        stack.enter_context(_process(folder, "gateway", [*python, "gpufn_gateway"], **gateway))
        for node, role in itertools.product(_NODES, ("runner", "agent")):  # the agents end first
            inside = ["ip", "netns", "exec", f"{_PREFIX}{node}", *python, f"gpufn_runtime.{role}"]
            variables = {"GPUFN_HOME": f"{folder}/{node}", "GPUFN_NODE": node, "GPUFN_GRACE": "1"}
            stack.enter_context(_process(folder, f"{role}-{node}", inside, **variables))
        url = f"http://127.0.0.1:{port}"
        with httpx.Client(base_url=url, timeout=10) as http:
            try:
                _until(lambda: len(_reporting(http)) == len(_NODES))
                yield url
            except BaseException:
                print(measure.log_tails(folder), file=sys.stderr)
                raise


@contextlib.contextmanager
def _process(folder: Path, name: str, command: list[str], **variables: str) -> Iterator[None]:
    environ = os.environ | {"GPUFN_NATS_URL": _NATS, "GPUFN_NATS_PLAINTEXT": "allow"} | variables
    with (folder / f"{name}.log").open("wb") as log:
        process = subprocess.Popen(command, env=environ, stdout=log, stderr=log, start_new_session=True)
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _until(condition: Callable[[], bool]) -> None:
    give_up = time.monotonic() + _WITHIN_S
    while True:
        with contextlib.suppress(httpx.TransportError):
            if condition():
                return
        assert time.monotonic() < give_up
        time.sleep(0.05)


def _run(*command: str) -> None:
    subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
