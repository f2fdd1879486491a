"""Two ranks of a gang as two processes on this machine; the test is the runner of rank 0."""

from __future__ import annotations

import json
import os
import signal
import socket
from pathlib import Path
from typing import Any

import pytest

from gpufn_core.domain.invocation import OutcomeKind
from gpufn_core.domain.worker import Gang, Rank
from gpufn_core.protocol.frames import Call, Cancel, Drain, Draining, Ready, Result, StartFailed, Verb
from gpufn_core.protocol.launch import EXIT_GANG_LOST, EXIT_START_FAILED
from gpufn_platform.shared_bodies.bodies import SharedBodies
from tests.ports import successive_ports
from tests.runtime.worker.conftest import JSON, MakePeer, Peer
from tests.waiting import until

ENVIRONMENT = """
    import os

    def f(pid_file=""):
        rank = os.environ["RANK"]
        if pid_file:
            with open(pid_file + rank, "w") as file:
                file.write(str(os.getpid()))
        print("hello from", rank)
        names = ("MASTER_ADDR", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "NNODES")
        return {name: os.environ[name] for name in (*names, "GLOO_SOCKET_IFNAME")}
"""
# Each rank waits for a value of the other, as a collective operation does.
EXCHANGE = """
    import os, socket, time

    def exchange(value):
        address, rank = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])), int(os.environ["RANK"])
        if rank == 0:
            with socket.create_server(address) as server:
                peer, _ = server.accept()
        else:
            while True:
                try:
                    peer = socket.create_connection(address)
                    break
                except OSError:
                    time.sleep(0.01)
        with peer:
            peer.sendall(b"%d\\n" % value)
            return value + int(peer.makefile().readline())

    def f(step=1):
        return exchange(step + 10 * int(os.environ["RANK"]))
"""


def free_port() -> int:
    """Return a port that is free, as is the next one."""
    return successive_ports(2)[0]


class Pair:
    """Rank 0 and rank 1. Only rank 0 has a runner."""

    def __init__(self, make_peer: MakePeer, source: str, **options: Any) -> None:
        ranks, self.port = (Rank("w-0", "a"), Rank("w-1", "b")), free_port()
        gang = Gang(ranks, "127.0.0.1", self.port, "secret")
        self.zero, self.one = (make_peer(source, worker=rank.worker, gang=gang, **options) for rank in ranks)

    def launch(self) -> Pair:
        self.zero.launch()
        self.one.launch()
        return self

    def launch_zero(self) -> Pair:
        """Launch rank 0, and return once it listens."""
        self.zero.launch()

        def listens() -> bool:
            with socket.socket() as probe:
                return probe.connect_ex(("127.0.0.1", self.port)) == 0

        until(listens)
        return self

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=2.0)

    def ready(self) -> Pair:
        self.launch().zero.ready()
        return self


@pytest.fixture
def pair(make_peer: MakePeer) -> Any:
    return lambda source, **options: Pair(make_peer, source, **options)


def test_each_rank_runs_the_call_and_the_caller_gets_the_result_of_rank_0(pair: Any, tmp_path: Path) -> None:
    both = pair(ENVIRONMENT).ready()
    result = json.loads(both.zero.call(json.dumps({"pid_file": str(tmp_path / "pid")}).encode()))
    assert result == {
        "MASTER_ADDR": "127.0.0.1", "RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1",
        "NODE_RANK": "0", "NNODES": "2", "GLOO_SOCKET_IFNAME": "lo",
    }  # fmt: skip
    assert sorted(path.name for path in tmp_path.iterdir()) == ["pid0", "pid1"]
    assert sorted(both.zero.logs) == [(1, "stdout", "[rank 1] hello from 1"), (1, "stdout", "hello from 0")]


@pytest.mark.parametrize("kind", ["sync", "async", "generator"])
def test_ranks_exchange_values_in_each_kind_of_function(pair: Any, kind: str) -> None:
    source = EXCHANGE if kind == "sync" else EXCHANGE.replace("def f(", "async def f(" if kind == "async" else "def g(")
    if kind == "generator":
        source += "\n    def f(step=1):\n        yield g(step)\n        yield g(step + 1)\n"
    both = pair(source, kind=kind).ready()
    for step in (1, 2):
        result = json.loads(both.zero.call(b'{"step": %d}' % step))
        assert result == (2 * step + 10 if kind != "generator" else [2 * step + 10, 2 * step + 12])


def test_it_is_ready_when_all_ranks_are_and_the_enter_hooks_run_at_the_same_time(pair: Any) -> None:
    source = (
        EXCHANGE
        + """
    from gpufn import enter, method

    class C:
        @enter
        def join(self):
            self.sum = exchange(int(os.environ["RANK"]) + 1)

        @method
        def f(self):
            return self.sum
    """
    )
    both = pair(source, qualname="C", methods={"f": "sync"}).ready()
    assert both.zero.call(method="f") == b"3"


def test_a_rank_that_cannot_start_fails_the_start_and_is_named(pair: Any) -> None:
    source = 'import os\n\nif os.environ["RANK"] == "1":\n    import nope\n\ndef f():\n    pass\n'
    both = pair(source).launch()
    both.zero.accept()
    frame, _ = both.zero.next()
    assert isinstance(frame, StartFailed)
    assert [part for part in ("rank 1 on b", "nope") if part not in frame.error.message] == []
    both.zero.hang_up()
    assert (both.zero.wait(), both.one.wait()) == (EXIT_START_FAILED, EXIT_START_FAILED)


def test_a_rank_that_has_not_started_in_time_is_named_and_may_be_tried_again(pair: Any) -> None:
    both = pair(ENVIRONMENT, startup_timeout_s=1.0)
    failure = both.zero.launch().start_failure()
    assert (failure.error.code, "rank 1 on b" in failure.error.message) == ("worker_lost", True)


def test_no_process_can_connect_once_all_ranks_have_joined(pair: Any) -> None:
    both = pair(ENVIRONMENT).ready()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", both.port))


def test_idle_strangers_yield_to_a_rank(pair: Any) -> None:
    both = pair(ENVIRONMENT).launch_zero()
    strangers = [both.connect() for _ in range(5)]
    assert strangers[0].recv(1) == b"", "at most twice as many handshakes as ranks are open"
    both.one.launch()
    both.zero.ready()
    for stranger in strangers:
        stranger.close()


@pytest.fixture
def stuck(pair: Any, tmp_path: Path) -> tuple[Pair, int]:
    """A gang that runs a call: rank 0 waits for rank 1, which sleeps."""
    source = (
        EXCHANGE
        + """
    def f(pid_file):
        if os.environ["RANK"] == "1":
            with open(pid_file, "w") as file:
                file.write(str(os.getpid()))
            time.sleep(600)
        exchange(1)
    """
    )
    both = pair(source).ready()
    pid_file = tmp_path / "pid"
    both.zero.run(json.dumps({"pid_file": str(pid_file)}).encode())
    until(lambda: pid_file.exists() and pid_file.read_text())
    return both, int(pid_file.read_text())


def test_a_rank_that_is_killed_ends_the_call_as_lost_and_the_gang(stuck: tuple[Pair, int]) -> None:
    both, _ = stuck
    both.one.process.send_signal(signal.SIGKILL)  # type: ignore[union-attr]
    draining, _ = both.zero.next()
    result, _ = both.zero.result()
    assert isinstance(draining, Draining), "before the slot is free: no other call may come"
    assert result.error is not None
    assert (result.kind, result.error.code, "rank 1 on b" in result.error.message) == ("lost", "worker_lost", True)
    both.zero.send(Drain())
    assert both.zero.wait() == EXIT_GANG_LOST


def test_if_rank_0_is_killed_the_other_ranks_exit_at_once(stuck: tuple[Pair, int]) -> None:
    both, _ = stuck
    both.zero.process.kill()  # type: ignore[union-attr]
    assert both.one.wait() == EXIT_GANG_LOST


def test_a_rank_whose_node_stops_does_not_cost_the_call_a_retry(stuck: tuple[Pair, int]) -> None:
    both, _ = stuck
    both.one.process.send_signal(signal.SIGTERM)  # type: ignore[union-attr]
    draining, _ = both.zero.next()
    assert isinstance(draining, Draining)
    both.one.process.kill()  # type: ignore[union-attr]  # its agent, after the grace period
    repeated, _ = both.zero.next()
    assert isinstance(repeated, Draining)
    result, _ = both.zero.result()
    assert result.error is not None
    assert (result.kind, result.error.code) == ("lost", "platform_stopping")


def test_a_child_that_user_code_forked_does_not_hide_the_end_of_its_rank(pair: Any, tmp_path: Path) -> None:
    source = """
    import os, time

    def f(folder):
        if os.fork() == 0:
            time.sleep(600)
        with open(folder + "/" + os.environ["RANK"], "w"):
            pass
        time.sleep(600)
    """
    both = pair(source).ready()
    both.zero.run(json.dumps({"folder": str(tmp_path)}).encode())
    until(lambda: len(list(tmp_path.iterdir())) == 2)
    both.zero.process.kill()
    assert both.one.wait() == EXIT_GANG_LOST
    for each in (both.zero, both.one):
        os.killpg(each.process.pid, signal.SIGKILL)


def test_a_rank_that_raises_ends_the_call_for_waiting_ranks(pair: Any) -> None:
    source = (
        EXCHANGE
        + """
    def f():
        if os.environ["RANK"] == "1":
            raise ValueError("only here")
        exchange(1)
    """
    )
    both = pair(source).ready()
    both.zero.run()
    draining, _ = both.zero.next()
    result, _ = both.zero.result()
    assert isinstance(draining, Draining)
    assert result.error is not None
    assert (result.kind, result.error.error_type) == ("raised", "ValueError")
    assert result.error.message == "rank 1 on b: only here"
    assert "ValueError" in result.error.error_bases
    both.zero.send(Drain())
    assert (both.zero.wait(), both.one.wait()) == (EXIT_GANG_LOST, EXIT_GANG_LOST)


def test_if_all_ranks_raise_or_reject_the_input_the_gang_lives_on(pair: Any) -> None:
    both = pair("def f(number: int = 0):\n    return 1 // number\n").ready()
    assert both.zero.failure()[1].message == "integer division or modulo by zero"
    assert both.zero.failure(b'{"nope": 1}')[0] == "rejected"
    assert both.zero.call(b'{"number": 1}') == b"1"


def test_an_error_of_another_rank_is_the_end_although_rank_0_has_a_result(pair: Any) -> None:
    both = pair('import os\n\ndef f():\n    return 1 // (1 - int(os.environ["RANK"]))\n').ready()
    kind, error = both.zero.failure()
    assert (kind, error.message) == ("raised", "rank 1 on b: integer division or modulo by zero")
    assert both.zero.failure()[0] == "raised", "all ranks had ended, so the gang lives on"


def test_a_cancel_reaches_all_ranks(pair: Any) -> None:
    source = "import asyncio\n\nasync def f(wait=0):\n    await asyncio.sleep(wait)\n"
    both = pair(source, kind="async").ready()
    number = both.zero.run(b'{"wait": 600}')
    both.zero.send(Cancel(number))
    result, _ = both.zero.result()
    assert result.kind is OutcomeKind.CANCELLED
    both.zero.call()


CHECKPOINTS = """
    import os, gpufn

    def f():
        context = gpufn.current()
        restored = context.restored
        context.checkpoint((restored or 0) + 1)
        if os.environ["RANK"] == "1":
            print("restored", restored)
        return restored
"""


def test_all_ranks_restore_the_same_checkpoint_and_only_rank_0_stores_one(pair: Any) -> None:
    both = pair(CHECKPOINTS).ready()
    both.zero.run(number=2)
    for verb in (Verb.RESTORE, Verb.RESTORE, Verb.CHECKPOINT):
        call, body = both.zero.next()
        assert isinstance(call, Call)
        assert call.verb == verb
        both.zero.answer(call.call, JSON, b"7") if verb is Verb.RESTORE else both.zero.answer(call.call, "", b"")
    assert body
    assert both.zero.result()[1] == b"7"
    assert both.zero.logs == [(1, "stdout", "[rank 1] restored 7")]


def test_only_rank_0_calls_other_functions(pair: Any) -> None:
    source = """
    import os, gpufn

    def f():
        if os.environ["RANK"] == "1":
            gpufn.Function.from_name("other").remote()
    """
    kind, error = pair(source).ready().zero.failure()
    assert (kind, error.error_type, "rank 0" in error.message) == ("raised", "InvalidInput", True)


def test_a_drain_runs_the_exit_hooks_of_all_ranks_at_the_same_time(pair: Any) -> None:
    source = (
        EXCHANGE
        + """
    from gpufn import exit, method

    class C:
        @exit
        def leave(self):
            os.write(1, b"left with %d" % exchange(1))

        @method
        def f(self):
            pass
    """
    )
    both = pair(source, qualname="C", methods={"f": "sync"}).ready()
    both.zero.send(Drain())
    assert (both.zero.wait(), both.one.wait()) == (0, 0)
    assert [each.printed() for each in (both.zero, both.one)] == ["left with 2", "left with 2"]


def test_a_rank_that_receives_sigterm_drains_the_gang_after_its_call(pair: Any, tmp_path: Path) -> None:
    source = """
    import os, time

    def f(go):
        while not os.path.exists(go):
            time.sleep(0.01)
    """
    both = pair(source).ready()
    both.zero.run(json.dumps({"go": str(tmp_path / "go")}).encode())
    both.one.process.send_signal(signal.SIGTERM)
    draining, _ = both.zero.next()
    assert isinstance(draining, Draining)
    (tmp_path / "go").touch()
    result, _ = both.zero.result()
    assert isinstance(result, Result)
    assert result.kind is OutcomeKind.SUCCEEDED
    both.zero.send(Drain())
    assert (both.zero.wait(), both.one.wait()) == (0, 0)


def test_arguments_that_do_not_fit_into_one_message_are_refused(pair: Any, tmp_path: Path) -> None:
    bodies = SharedBodies(tmp_path / "bodies" / "w-0")
    both = pair(
        "def f(data: bytes) -> int:\n    return len(data)\n", shared_bodies=str(bodies.folder), raw="data"
    ).ready()
    octets = {"content_type": "application/octet-stream"}
    large, fits = bodies.write([bytes(9 << 20)]), bodies.write([bytes(1 << 20)])
    kind, error = both.zero.failure(b"", shared_body=large, **octets)
    assert (kind, error.code) == ("rejected", "payload_too_large")
    assert both.zero.call(b"", shared_body=fits, **octets) == b"%d" % (1 << 20)


@pytest.mark.parametrize("following", [0, 1], ids=["the gang's port", "MASTER_PORT"])
def test_a_port_that_is_taken_fails_the_start_with_its_number(pair: Any, following: int) -> None:
    both: Pair = pair(ENVIRONMENT)
    port = both.port + following
    with socket.create_server(("", port)):
        failure = both.zero.launch().start_failure()
    assert [part for part in (str(port), "node a") if part not in failure.error.message] == []


def test_a_runner_that_restarts_does_not_end_the_gang(pair: Any) -> None:
    both = pair(EXCHANGE).ready()
    zero: Peer = both.zero
    zero.hang_up()
    zero.listen()
    assert zero.ready()
    assert zero.call() == b"12"


def test_a_runner_that_restarts_during_a_stream_does_not_end_the_gang(pair: Any) -> None:
    source = """
    import time

    def f(items):
        for item in range(items):
            time.sleep(0.01)
            yield item
    """
    zero: Peer = pair(source, kind="generator").ready().zero
    zero.run(b'{"items": 100000}', stream=True, credits=100000)
    zero.item()
    zero.hang_up()
    zero.listen()
    hello = zero.accept()
    assert isinstance(zero.next()[0], Ready)
    for _ in range(2):  # the stream may be reported as ended a moment after the first call
        assert zero.call(b'{"items": 1}') == b"[0]"
    assert zero.freed == hello.running, "0 if the stream had ended before the worker connected"
