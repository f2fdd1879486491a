"""How a worker starts, loses its runner, and ends."""

from __future__ import annotations

import json
import os
import resource
import select
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import cloudpickle
import msgspec
import pytest

from gpufn_core.domain.worker import Cause
from gpufn_core.protocol.codec import PROTOCOL
from gpufn_core.protocol.frames import Drain, Draining, Hello, Ready
from gpufn_core.protocol.launch import EXIT_LINK_LOST, EXIT_START_FAILED, PID_VARIABLE, Sandbox
from gpufn_core.spec.function_spec import EntryPoint
from gpufn_platform.process.supervisor_fifo import open_fifo
from gpufn_platform.sandbox.host_paths import own_python_folders
from gpufn_platform.sandbox.support import probe
from tests.conftest import ROOT, missing
from tests.e2e.test_sandbox import REFUSE_NAMESPACES

Start = Any


def test_it_greets_loads_and_reports_its_modules(make_peer: Start) -> None:
    worker = make_peer("import numpy, json\ndef f(): ...").launch()
    assert worker.accept() == Hello(PROTOCOL, "w-1")
    ready, _ = worker.next()
    assert ready.modules == ("numpy",)
    assert ready.load_s > 0


def test_a_plain_function_needs_no_heavy_modules(start: Start) -> None:
    source = "import sys\ndef f(names: list[str]): return [name for name in names if name in sys.modules]"
    worker = start(source, as_fork=False)
    assert worker.call(b'{"names": ["asyncio", "httpx", "click", "rich", "numpy", "logging", "cloudpickle"]}') == b"[]"


def test_siblings_are_imported_from_the_bundle_and_files_read_from_it(start: Start) -> None:
    worker = start(
        "from pkg.sib import there\ndef f(): return [there, open('labels.txt').read()]",
        files={"pkg/sib.py": "there = 'sibling'", "pkg/__init__.py": "", "labels.txt": "cat"},
    )
    assert worker.call() == b'["sibling","cat"]'


def test_a_pickled_function_is_loaded_by_value(start: Start) -> None:
    factor = 3
    worker = start(pickled=cloudpickle.dumps(lambda x: x * factor))
    assert worker.call(b'{"x": 14}') == b"42"


def test_the_specs_environment_is_set_before_the_code_loads(start: Start) -> None:
    worker = start("import os\nfound = os.environ['FROM_SPEC']\ndef f(): return found")
    assert worker.call() == b'"yes"'


@pytest.mark.parametrize(
    ("source", "phase", "message", "shown"),
    [
        ("def f(:\n    pass", "load", "invalid syntax (app.py, line 1)", "def f(:"),
        ("import nowhere_to_be_found", "load", "No module named 'nowhere_to_be_found'", 'File "app.py", line 1'),
        ("x = 1 / 0\ndef f(): ...", "load", "division by zero", 'File "app.py", line 1'),
        ("def g(): ...", "load", "the module app has no f", ""),
        ("f = 3", "load", "app.f is 'int' but was deployed as a function", ""),
        ("import sys; sys.exit(1)", "load", "1", "SystemExit"),
    ],
)
def test_code_that_does_not_load_reports_the_reason(
    make_peer: Start, source: str, phase: str, message: str, shown: str
) -> None:
    failed = make_peer(source).launch().start_failure()
    assert (failed.phase, failed.error.code, failed.error.message) == (phase, "function_start_failed", message)
    shown_in = failed.error.traceback or ""
    assert shown in shown_in
    assert "gpufn_runtime" not in shown_in
    assert "importlib" not in shown_in


@pytest.mark.parametrize("options", [{}, {"cgroup_procs": ("/nowhere/cgroup.procs",)}])
def test_a_worker_that_cannot_start_exits_after_the_runner_received_the_reason(
    make_peer: Start, options: dict[str, Any]
) -> None:
    """Regression: the agent reported the exit before the runner the error, and a deploy failed without a reason."""
    worker = make_peer("x = 1 / 0", **options).launch()
    worker.accept()
    worker.next()
    process = os.pidfd_open(worker.process.pid)
    assert not select.select([process], [], [], 0.3)[0]
    os.close(process)
    worker.hang_up()
    assert worker.wait() == EXIT_START_FAILED


def test_a_worker_ends_with_its_supervisor_whatever_it_does(make_peer: Start, tmp_path: Path) -> None:
    fifo, told = tmp_path / "up", tmp_path / "told"
    os.mkfifo(told)
    source = f"""
        import re, subprocess
        child = subprocess.Popen(["sleep", "600"])
        open({str(told)!r}, "w").write(str(child.pid))
        re.match("(a+)+$", "a" * 64 + "b")  # for ever, and holds the interpreter
        """
    with open_fifo(fifo):
        worker = make_peer(source, supervisor_fifo=str(fifo)).launch()
        worker.accept()
        child = os.pidfd_open(int(told.read_text()))
    assert worker.wait() == -signal.SIGKILL
    assert select.select([child], [], [], 10)[0], "its child lives on"
    os.close(child)


def test_a_worker_whose_supervisor_has_ended_does_not_start(make_peer: Start, tmp_path: Path) -> None:
    fifo = tmp_path / "up"
    worker = make_peer("def f(): ...", supervisor_fifo=str(fifo)).launch()
    assert worker.wait() == EXIT_LINK_LOST
    os.mkfifo(fifo)
    worker = make_peer("def f(): ...", supervisor_fifo=str(fifo)).launch()
    assert worker.wait() == EXIT_LINK_LOST


def test_it_receives_its_secrets_and_shows_them_nowhere(make_peer: Start, tmp_path: Path) -> None:
    path = tmp_path / "k"
    with socket.socket(socket.AF_UNIX) as agent:
        agent.bind(str(path))
        agent.listen()
        source = """
            import os
            print("on import", os.environ["TOKEN"])
            def f():
                print("a", os.environ["TOKEN"][:5], end="")
                print("b" + os.environ["TOKEN"][:5], end="")
                print(os.environ["TOKEN"][5:])
                assert open("/proc/self/coredump_filter").read().strip() == "00000000"
                raise ValueError("bad " + os.environ["TOKEN"])
        """
        worker = make_peer(source, secrets_socket=str(path)).launch()
        peer, _ = agent.accept()
        with peer:
            peer.sendall(b'{"TOKEN": "swordfish"}')
        worker.ready()
        worker.run()
        error = worker.result()[0].error
    assert error.message == "bad [redacted]"
    assert "swordfish" not in error.traceback
    assert [text for _, _, text in worker.logs] == ["on import [redacted]", "a swordb[redacted]"]


def test_without_its_secrets_it_does_not_start(make_peer: Start, tmp_path: Path) -> None:
    failure = make_peer("def f(): ...", secrets_socket=str(tmp_path / "k")).launch().start_failure()
    assert (failure.phase, failure.error.code) == ("load", "function_start_failed")


def start_cold(peer: Any, *wrapper: str) -> int:
    """Start the worker as an agent does whose workers have a PID namespace. Return the end that its pid arrives at."""
    reports, its_end = os.pipe()
    peer.process = subprocess.Popen(
        [*wrapper, sys.executable, "-P", "-m", "gpufn_runtime.worker", str(peer.config_path)],
        env=os.environ | {PID_VARIABLE: str(its_end)},
        pass_fds=[its_end],
        start_new_session=True,
    )
    os.close(its_end)
    return reports


def test_a_cold_worker_goes_on_in_its_pid_namespace(make_peer: Start) -> None:
    """Bug: the link was made before the fork, so the worker took itself for a child of user code, and ended."""
    if trouble := probe().missing():
        missing(f"all parts of the sandbox: {trouble}")
    readable = own_python_folders([os.fspath(ROOT)], os.environ)
    peer = make_peer("import os\ndef f(): return [os.getpid(), os.getppid()]")
    sandbox = Sandbox(own_pids=True, readable=readable, writable=(os.path.dirname(peer.config.socket),))
    peer.config_path.write_bytes(msgspec.json.encode(msgspec.structs.replace(peer.config, sandbox=sandbox)))
    with open(start_cold(peer)) as pipe:
        pid = int(pipe.read())
    peer.ready()
    number, parent = json.loads(peer.call())
    assert number not in (1, pid)
    assert parent == 0, "its parent is outside"
    os.kill(pid, signal.SIGKILL)


def test_a_worker_that_cannot_enter_a_pid_namespace_reports_it_and_loads_no_code(
    make_peer: Start, tmp_path: Path
) -> None:
    peer = make_peer(f"open({str(tmp_path / 'loaded')!r}, 'w')\ndef f(): ...", sandbox=Sandbox(own_pids=True))
    reports = start_cold(peer, *REFUSE_NAMESPACES)
    failed = peer.start_failure()
    assert failed.phase == "load"
    assert "cannot enter the sandbox" in failed.error.message
    with open(reports) as pipe:
        assert pipe.read() == ""
    assert not (tmp_path / "loaded").exists()


def test_a_failed_hook_reports_the_reason(make_peer: Start) -> None:
    source = """
        class C:
            def setup(self): raise RuntimeError("no model")
            setup.__gpufn_hook__ = "enter"
            def m(self): ...
        """
    failed = make_peer(source, qualname="C", methods={"m": "sync"}).launch().start_failure()
    assert (failed.phase, failed.error.message, failed.error.error_type) == ("enter", "no model", "RuntimeError")


def test_a_module_named_like_one_of_pythons_is_refused_with_advice(make_peer: Start) -> None:
    peer = make_peer("", files={"queue.py": "def f(): ..."})
    entry = peer.config.spec.entry
    spec = msgspec.structs.replace(peer.config.spec, entry=EntryPoint("queue", entry.qualname))
    peer.config_path.write_bytes(msgspec.json.encode(msgspec.structs.replace(peer.config, spec=spec)))
    failed = peer.launch().start_failure()
    assert failed.error.message.endswith("rename the file")


def test_a_cgroup_that_cannot_be_joined_is_a_failed_start(make_peer: Start) -> None:
    failed = make_peer("def f(): ...", cgroup_procs=("/nowhere/cgroup.procs",)).launch().start_failure()
    assert (failed.phase, failed.error.code) == ("load", "function_start_failed")
    assert "/nowhere/cgroup.procs" in failed.error.message


def test_it_joins_its_cgroups_and_keeps_to_its_memory(start: Start, tmp_path: Path) -> None:
    joined = tmp_path / "cgroup.procs"
    worker = start(
        "def f(size: int): return len(bytearray(size))", cgroup_procs=(str(joined),), memory_limit_bytes=512 << 20
    )
    assert worker.call(b'{"size": 1000}') == b"1000"
    assert worker.failure(b'{"size": 1000000000}')[1].error_type == "MemoryError"
    assert worker.call(b'{"size": 1000}') == b"1000"
    assert joined.read_text() == "0"


def test_a_worker_has_the_nodes_limit_of_open_files_and_may_raise_it(start: Start) -> None:
    """select(2) accepts no descriptor above 1023, so a higher limit must be requested."""
    worker = start("import resource\ndef f(): return resource.getrlimit(resource.RLIMIT_NOFILE)", open_files=100)
    assert worker.call() == f"[100,{resource.getrlimit(resource.RLIMIT_NOFILE)[1]}]".encode()


_WITH_EXIT_HOOK = """
    import os
    class C:
        def bye(self): os.write(1, b"exit hook ran")
        bye.__gpufn_hook__ = "exit"
        def m(self, wait: bool = False):
            if wait:
                import gpufn.call.transport
                from gpufn.call.transport_protocol import EncodedCall, Target
                gpufn.call.transport.current().call(EncodedCall(Target("other"), "", b""))
            return os.getpid()
    """


def test_drain_runs_the_exit_hooks_and_ends_well(start: Start) -> None:
    worker = start(_WITH_EXIT_HOOK, qualname="C", methods={"m": "sync"})
    worker.call(method="m")
    worker.send(Drain())
    assert worker.wait() == 0
    assert worker.printed() == "exit hook ran"


def test_exit_hooks_receive_the_cause_for_at_most_a_while(start: Start) -> None:
    worker = start(
        """
        import os, time
        import gpufn_runtime.worker.lifecycle as lifecycle
        lifecycle.EXIT_HOOKS_S = 0.2
        class C:
            def bye(self, cause): os.write(1, f"ends: {cause}".encode())
            def fails(self): raise OSError("is busy")
            def hangs(self): time.sleep(60)
            for hook in (bye, fails, hangs): hook.__gpufn_hook__ = "exit"
            def m(self): return 1
        """,
        qualname="C",
        methods={"m": "sync"},
    )
    worker.call(method="m")
    worker.send(Drain(Cause.DEPLOY))
    assert worker.wait() == 0
    assert worker.printed() == "ends: deploy"


def test_sigterm_lets_running_calls_finish(start: Start) -> None:
    worker = start(_WITH_EXIT_HOOK, qualname="C", methods={"m": "sync"})
    worker.run(b'{"wait": true}', method="m")
    call, _ = worker.next()
    worker.process.send_signal(signal.SIGTERM)
    worker.process.send_signal(signal.SIGINT)  # which is meant for the supervisor in the same terminal
    worker.answer(call.call, "", b"")
    assert {type(worker.next()[0]).__name__ for _ in range(2)} == {"Draining", "Result"}
    worker.send(Drain())
    assert worker.wait() == 0
    assert worker.printed() == "exit hook ran"


def test_sigterm_ends_an_idle_worker(start: Start) -> None:
    worker = start(_WITH_EXIT_HOOK, qualname="C", methods={"m": "sync"})
    worker.process.send_signal(signal.SIGTERM)
    assert worker.next()[0] == Draining()
    worker.send(Drain())
    assert worker.wait() == 0


@pytest.mark.parametrize("calls_before", [0, 20], ids=["waits for its reader", "reads the socket"])
def test_a_sigterm_that_does_not_wake_the_main_thread_is_handled(start: Start, calls_before: int) -> None:
    """Like a signal that arrives just before a blocking call."""
    worker = start(
        """
        import pathlib, signal, threading
        stat = pathlib.Path(f"/proc/self/task/{threading.main_thread().native_id}/stat")
        def terminate():
            while stat.read_text().rpartition(")")[2].split()[0] != "S":
                pass
            signal.pthread_kill(threading.get_ident(), signal.SIGTERM)
        def f(last: bool = False):
            if last:
                threading.Thread(target=terminate).start()
        """,
        as_fork=False,  # Python 3.11 does not know the native id of the main thread of a fork
    )
    for _ in range(calls_before):
        worker.call()
    worker.call(b'{"last": true}')
    assert isinstance(worker.next()[0], Draining)
    worker.send(Drain())
    assert worker.wait() == 0


def test_a_call_that_was_on_its_way_at_sigterm_is_run(start: Start) -> None:
    worker = start(_WITH_EXIT_HOOK, qualname="C", methods={"m": "sync"})
    worker.process.send_signal(signal.SIGTERM)
    assert worker.next()[0] == Draining()
    worker.run(method="m")
    assert worker.result()[0].kind.value == "succeeded"
    worker.send(Drain())
    assert worker.wait() == 0


def test_sigterm_without_a_runner_ends_the_worker(start: Start) -> None:
    worker = start(_WITH_EXIT_HOOK, qualname="C", methods={"m": "sync"})
    worker.hang_up()
    worker.process.send_signal(signal.SIGTERM)
    assert worker.wait() == 0


def test_it_meets_the_next_runner_and_forgets_requests_of_the_old_one(start: Start) -> None:
    worker = start(
        """
        import gpufn.call.transport
        from gpufn.call.transport_protocol import EncodedCall, Target
        def f(wait: bool):
            if wait:
                try:
                    gpufn.call.transport.current().call(EncodedCall(Target("other"), "", b""))
                except Exception as error:
                    print(error)
            return wait
        """
    )
    worker.run(b'{"wait": true}')
    worker.next()
    worker.run(b'{"wait": true}')  # queued: it must never run
    worker.hang_up()
    worker.listen()
    worker.ready()
    assert worker.call(b'{"wait": false}') == b"false"
    worker.send(Drain())
    assert worker.wait() == 0


def test_it_reports_running_calls_and_their_end_to_the_next_runner(start: Start, tmp_path: Path) -> None:
    worker = start(
        """
        import os, time
        def f(path: str):
            while path and not os.path.exists(path):
                time.sleep(0.002)
            return path
        """,
        concurrency=2,
    )
    signal = tmp_path / "go"
    worker.run(b'{"path": "%s"}' % str(signal).encode())
    assert worker.call(b'{"path": ""}') == b'""', "the first one runs by now"
    worker.hang_up()
    worker.listen()
    hello = worker.accept()
    assert (hello.was_ready, hello.running) == (True, 1)
    assert isinstance(worker.next()[0], Ready)
    signal.touch()
    while not worker.freed:
        assert worker.call(b'{"path": ""}') == b'""'
    assert worker.freed == 1


def test_without_a_runner_it_runs_its_exit_hooks_and_ends(
    start: Start, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import gpufn_runtime.worker.lifecycle as lifecycle\nlifecycle.RECONNECT_S = 0.0\n"
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(tmp_path), os.environ["PYTHONPATH"])))
    worker = start(_WITH_EXIT_HOOK, qualname="C", methods={"m": "sync"}, as_fork=False)
    worker.hang_up()
    assert worker.wait() == 4
    assert worker.printed() == "exit hook ran"


@pytest.mark.parametrize("garbage", [b"\xff" * 64, b"\0\0\0\1\0\0\0\0\xc0", b"GET / HTTP/1.1\r\n\r\n"])
def test_garbage_from_the_runner_ends_the_worker_in_order(start: Start, garbage: bytes) -> None:
    worker = start(_WITH_EXIT_HOOK, qualname="C", methods={"m": "sync"})
    worker.send_bytes(garbage)
    assert worker.wait() == 4
    assert worker.printed().endswith("exit hook ran")


def test_atexit_hooks_that_never_return_do_not_keep_the_process() -> None:
    """Regression: a worker that had sent StartFailed held its share for as long as its atexit hooks ran."""
    script = (
        "import atexit, time; from gpufn_runtime.worker import process; process.ATEXIT_S = 0.2; "
        "atexit.register(time.sleep, 60); process.exit_now(3)"
    )
    assert subprocess.run([sys.executable, "-c", script], timeout=20, check=False).returncode == 3
