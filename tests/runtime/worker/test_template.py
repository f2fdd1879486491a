"""The template process: a forked worker behaves like one that started cold."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gpufn_core.protocol.frames import Drain
from gpufn_core.protocol.launch import ForkReply, ForkRequest, TemplateReady
from tests.runtime.worker.engines.engines import write_negation
from tests.waiting import until

Start = Any
_PR_SET_CHILD_SUBREAPER = 36


class Template:
    def __init__(self, *modules: str, **environ: str) -> None:
        one = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "ORT_DISABLE_TELEMETRY")
        env = {**os.environ, **dict.fromkeys(one, "1"), **environ}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "gpufn_runtime.worker", "--template", *modules],
            env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        assert self.process.stdout is not None
        self.ready = msgspec.json.decode(self.process.stdout.readline(), type=TemplateReady)

    def fork(self, worker: Any, **env: str) -> ForkReply:
        fifo = worker.output
        if not fifo.exists():
            os.mkfifo(fifo)
        return self.ask(ForkRequest(str(worker.config_path), str(fifo), {"PATH": "/bin", **env}))

    def fork_ahead(self) -> int:
        """The pid of the worker that was forked ahead."""
        assert self.process.stdin is not None
        known = _children()
        self.process.stdin.write(b"\n")
        self.process.stdin.flush()
        pid: int = until(lambda: _children() - known).pop()
        return pid

    def ask(self, request: ForkRequest) -> ForkReply:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(msgspec.json.encode(request) + b"\n")
        self.process.stdin.flush()
        return msgspec.json.decode(self.process.stdout.readline(), type=ForkReply)

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


def _children() -> set[int]:
    return set(map(int, Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()))


@pytest.fixture
def adopt() -> Iterator[None]:
    """Orphans become our children, like the agent's."""
    prctl = ctypes.CDLL(None).prctl
    prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    yield
    prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


@pytest.fixture
def make_template(adopt: None) -> Iterator[Any]:
    made: list[Template] = []

    def make(*modules: str, **environ: str) -> Template:
        made.append(Template(*modules, **environ))
        return made[-1]

    yield make
    for template in made:
        template.close()


def test_a_forked_worker_lives_as_a_cold_one(make_peer: Start, make_template: Any) -> None:
    template = make_template("numpy", "not_there")
    assert (template.ready.modules, template.ready.missing, template.ready.error) == (("numpy",), ("not_there",), "")
    assert template.ready.resident_bytes > 1 << 20
    worker = make_peer(
        """
        import os, sys
        had_numpy = "numpy" in sys.modules
        def f():
            os.write(1, b"raw")
            return [had_numpy, os.environ["MINE"], "OMP_NUM_THREADS" in os.environ, os.getsid(0) == os.getpid(),
                    sys.stdin.read(), os.getpid(), os.getppid()]
        """
    )
    reply = template.fork(worker, MINE="yes")
    assert worker.ready().modules == (), "numpy is the template's, and may be nothing to this function"
    output = os.open(worker.output, os.O_RDONLY)
    answer = msgspec.json.decode(worker.call())
    assert answer[:-1] == [True, "yes", False, True, "", reply.pid]
    assert answer[-1] == os.getpid()
    assert os.read(output, 100) == b"raw"
    os.close(output)
    worker.hang_up()
    os.kill(reply.pid, 9)
    assert os.waitstatus_to_exitcode(os.waitpid(reply.pid, 0)[1]) == -9


def test_modules_are_imported_with_the_variables_that_are_set_in_the_sandbox(
    make_peer: Start, make_template: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "reads.py").write_text("import os\nvalue = os.environ['MODE'], os.environ['OMP_NUM_THREADS']\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(tmp_path), os.environ["PYTHONPATH"])))
    template = make_template("reads", GPUFN_TEMPLATE_ENV='{"MODE":"fast","OMP_NUM_THREADS":"2"}')
    worker = make_peer("import os, sys\ndef f(): return [sys.modules['reads'].value, os.environ.get('MODE')]")
    reply = template.fork(worker)
    worker.ready()
    assert msgspec.json.decode(worker.call()) == [["fast", "2"], None]
    worker.hang_up()
    os.kill(reply.pid, 9)
    os.waitpid(reply.pid, 0)


def test_a_forked_worker_has_its_own_time_zone(make_peer: Start, make_template: Any) -> None:
    """Regression: the C library reads TZ once, so all workers had the template's."""
    template = make_template()
    worker = make_peer("import time\ndef f(): return [time.localtime(0).tm_hour, time.tzname[0]]")
    reply = template.fork(worker, TZ="HERE-9")
    worker.ready()
    assert worker.call() == b'[9,"HERE"]'
    worker.hang_up()
    os.kill(reply.pid, 9)
    os.waitpid(reply.pid, 0)


def test_a_forked_worker_has_its_own_folder_for_temporary_files(
    make_peer: Start, make_template: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: a module that read it at import time gave all workers the template's folder, which is never
    emptied."""
    (tmp_path / "asks.py").write_text("import tempfile\ntempfile.gettempdir()\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(tmp_path), os.environ["PYTHONPATH"])))
    template = make_template("asks")
    worker = make_peer("import tempfile\ndef f(): return tempfile.gettempdir()")
    reply = template.fork(worker, TMPDIR=str(tmp_path))
    worker.ready()
    assert msgspec.json.decode(worker.call()) == str(tmp_path)
    worker.hang_up()
    os.kill(reply.pid, 9)
    os.waitpid(reply.pid, 0)


@pytest.mark.parametrize("cpu", [1.0, 2.0])
def test_the_libraries_of_a_template_get_the_workers_number_of_threads(
    make_peer: Start, make_template: Any, cpu: float
) -> None:
    template = make_template("numpy")
    worker = make_peer(
        """
        import os
        import numpy
        def f():
            product = numpy.ones((600, 600)) @ numpy.ones((600, 600))
            return [bool((product == 600).all()), len(os.listdir("/proc/self/task"))]
        """,
        cpu=cpu,
    )
    reply = template.fork(worker)
    worker.ready()
    one_reads = 1
    assert msgspec.json.decode(worker.call()) == [True, int(cpu) + one_reads]
    worker.hang_up()
    os.kill(reply.pid, 9)
    os.waitpid(reply.pid, 0)


def test_workers_of_one_template_share_no_random_numbers(make_peer: Start, make_template: Any) -> None:
    template = make_template("numpy", "numpy.random")
    drawn = []
    for _ in range(2):
        worker = make_peer("import random, numpy\ndef f(): return [random.random(), numpy.random.rand()]")
        reply = template.fork(worker)
        worker.ready()
        drawn += msgspec.json.decode(worker.call())
        worker.process = None
        worker.send(Drain())
        assert os.waitstatus_to_exitcode(os.waitpid(reply.pid, 0)[1]) == 0
    assert len(set(drawn)) == 4


def test_a_template_with_a_thread_is_never_forked_from(
    make_template: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "threaded.py").write_text(
        "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n"
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(tmp_path), os.environ["PYTHONPATH"])))
    template = make_template("threaded")
    assert (template.ready.refused_module, template.ready.modules) == ("threaded", ())
    assert "importing threaded started 1 threads" in template.ready.error
    assert template.process.wait(20) == 1


def test_output_of_imports_does_not_disturb_the_replies(
    make_template: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "chatty.py").write_text("print('hello')\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(tmp_path), os.environ["PYTHONPATH"])))
    assert make_template("chatty").ready.modules == ("chatty",)


def test_a_template_with_onnxruntime_in_memory_makes_workers_with_models(
    make_peer: Start, make_template: Any, tmp_path: Path
) -> None:
    template = make_template("onnxruntime")
    assert template.ready.error == "", "importing it started no thread"
    worker = make_peer(models=("net",), engines={"net": (str(write_negation(tmp_path / "engine")),)})
    reply = template.fork(worker)
    assert worker.ready().modules == (), "all of it is the template's"
    assert worker.call(b'{"x": [[1, 2]]}') == b'{"y":[[-1.0,-2.0]]}'
    worker.hang_up()
    os.kill(reply.pid, 9)
    os.waitpid(reply.pid, 0)


def test_a_request_that_cannot_be_served_is_answered_with_the_reason(
    make_peer: Start, make_template: Any, tmp_path: Path
) -> None:
    template = make_template()
    assert template.ask(ForkRequest(str(tmp_path / "no.json"), "/dev/null", {})) == ForkReply(
        error=f"there is no {tmp_path}/no.json"
    )
    peer = make_peer()
    reply = template.ask(ForkRequest(str(peer.config_path), str(tmp_path / "no-fifo"), {}))
    assert "no-fifo" in reply.error


def test_a_worker_forked_ahead_is_like_one_forked_on_demand(make_peer: Start, make_template: Any) -> None:
    template = make_template("numpy")
    waits = template.fork_ahead()
    worker = make_peer(
        """
        import os, random, sys
        def f(): return [os.environ["MINE"], os.getpid(), os.getsid(0), sys.stdin.read(), "numpy" in sys.modules]
        """
    )
    assert template.fork(worker, MINE="yes").pid == waits
    worker.ready()
    assert msgspec.json.decode(worker.call()) == ["yes", waits, waits, "", True]
    worker.hang_up()
    os.kill(waits, 9)
    os.waitpid(waits, 0)


def test_a_worker_forked_ahead_ends_with_its_template(make_template: Any) -> None:
    template = make_template()
    waits = template.fork_ahead()
    template.close()
    assert os.waitstatus_to_exitcode(os.waitpid(waits, 0)[1]) == 0


def test_when_the_one_forked_ahead_was_killed_another_is_forked(make_peer: Start, make_template: Any) -> None:
    template = make_template()
    waits = template.fork_ahead()
    os.kill(waits, 9)
    os.waitpid(waits, 0)
    worker = make_peer("def f(): return 1")
    reply = template.fork(worker)
    worker.ready()
    assert reply.pid not in (0, waits)
    assert worker.call() == b"1"
    worker.hang_up()
    os.kill(reply.pid, 9)
    os.waitpid(reply.pid, 0)


def test_a_template_that_has_started_a_thread_since_refuses_and_ends(
    make_peer: Start, make_template: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "late.py").write_text(
        "import signal, threading\n"
        "start = lambda *_: threading.Thread(target=threading.Event().wait, daemon=True).start()\n"
        "signal.signal(signal.SIGUSR1, start)\n"
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(tmp_path), os.environ["PYTHONPATH"])))
    template = make_template("late")
    assert template.ready.error == ""
    template.process.send_signal(10)
    threads = Path(f"/proc/{template.process.pid}/task")
    until(lambda: len(list(threads.iterdir())) == 2)
    assert "1 threads" in template.fork(make_peer()).error
    assert template.process.wait(30) == 1
