"""Failures of a call, and the error report for its caller."""

from __future__ import annotations

import json
import signal
from typing import Any

import pytest

from gpufn_core.protocol.frames import Result
from gpufn_core.spec.function_spec import Batch

Start = Any


def test_an_exception_is_described_with_the_users_frames_only(start: Start) -> None:
    worker = start(
        """
        class Odd(ValueError): pass
        def f(): inner()
        def inner(): raise Odd("nothing works")
        """
    )
    kind, error = worker.failure()
    assert (kind, error.code, error.message, error.error_type) == ("raised", "function_raised", "nothing works", "Odd")
    assert error.error_bases == ("Odd", "ValueError", "Exception")
    assert error.error_classes == ("app:Odd", "builtins:ValueError", "builtins:Exception")
    lines = error.traceback.splitlines()
    assert [line for line in lines if "File" in line] == [
        '  File "app.py", line 3, in f',
        '  File "app.py", line 4, in inner',
    ]
    assert lines[-1] == "app.Odd: nothing works"


@pytest.mark.parametrize(
    ("body", "error_type", "message"),
    [
        ("raise SystemExit(3)", "SystemExit", "3"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt", "KeyboardInterrupt"),
        ("class Bad(Exception):\n        def __str__(self): raise RuntimeError\n    raise Bad", "f.<locals>.Bad",
         "<f.<locals>.Bad, whose str() failed>"),
        ("class Rude(Exception):\n        def __str__(self): raise SystemExit\n    raise Rude", "f.<locals>.Rude",
         "<f.<locals>.Rude, whose str() failed>"),
        ("raise ValueError('\\ud800')", "ValueError", "\\ud800"),
        # Not f itself: Python 3.13.0 never ends a function that calls itself with its parameters' defaults.
        ("deep = lambda: deep()\n    deep()", "RecursionError", "maximum recursion depth exceeded"),
    ],
)  # fmt: skip
def test_whatever_a_call_raises_the_worker_lives_on(start: Start, body: str, error_type: str, message: str) -> None:
    worker = start(f"def f(ok: bool = False):\n    if ok: return 1\n    {body}")
    kind, error = worker.failure()
    assert (kind, error.error_type) == ("raised", error_type)
    assert error.message.startswith(message)
    assert worker.call(b'{"ok": true}') == b"1"


def test_an_async_call_that_exits_does_not_end_the_worker(start: Start) -> None:
    worker = start("async def f(ok: bool = False):\n    if not ok: raise SystemExit\n    return 1", kind="async")
    assert worker.failure()[1].error_type == "SystemExit"
    assert worker.call(b'{"ok": true}') == b"1"


def test_a_message_of_a_gigabyte_is_cut(start: Start) -> None:
    worker = start("def f(): raise ValueError('x' * 10_000_000)")
    _, error = worker.failure()
    assert len(error.message) < 20_000
    assert len(error.traceback) < 70_000


_LONG = "k" * 2_000_000
_A_THING_AT = "class Thing: pass\ndef f(ok: bool = False): return 1 if ok else {%s: Thing()}"


@pytest.mark.parametrize(
    ("source", "body", "told"),
    [
        ("def f(ok: bool = False): return 1", json.dumps({_LONG: 1}), "kk: there is no such parameter; it takes ok"),
        (_A_THING_AT % "'k' * 2_000_000", "{}", "which cannot be sent as application/json"),
        (_A_THING_AT % "'\\udcff'", "{}", "the result at .\\udcff is an app.Thing"),
        ("def f(ok: bool = False):\n    if ok: return 1\n    raise type('k' * 2_000_000, (Exception,), {})('x')", "{}",
         "x"),
    ],
    ids=["input", "result", "result with half a surrogate pair", "type"],
)  # fmt: skip
def test_an_error_with_a_name_of_any_length_fits_into_a_frame(start: Start, source: str, body: str, told: str) -> None:
    """Regression: the runner disconnected on a longer one, so any caller could end a worker under all the others."""
    worker = start(source)
    _, error = worker.failure(body.encode())
    assert told in error.message
    assert (
        len(json.dumps([error.message, error.field, error.error_type, *error.error_bases, *error.error_classes]))
        < 40_000
    )
    assert worker.call(b'{"ok": true}') == b"1"


@pytest.mark.parametrize("raised", ["SystemExit", "Bad"])
def test_whatever_checks_an_input_may_raise_anything(start: Start, raised: str) -> None:
    worker = start(
        f"""
        import dataclasses
        class Bad(Exception):
            def __str__(self): raise RuntimeError
        @dataclasses.dataclass
        class Point:
            x: int
            def __post_init__(self): raise {raised}
        def f(point: Point | None = None): return 1
        """
    )
    kind, error = worker.failure(b'{"point": {"x": 1}}')
    assert (kind, error.code) == ("rejected", "invalid_input")
    assert f": {raised}: " in error.message
    assert worker.call() == b"1"


def test_memory_of_a_failed_call_is_released_before_its_error_is_reported(start: Start) -> None:
    """Regression: there was no memory left to report it: the worker died, or the call never ended."""
    worker = start(
        """
        held = 0
        class Large:
            def __init__(self):
                global held
                held += 1
            def __del__(self):
                global held
                held -= 1
        class Full(MemoryError):
            def __str__(self):
                return f"{held} are held"
        def f():
            large = Large()
            raise Full
        """
    )
    assert worker.failure()[1].message == "0 are held"


def test_an_input_that_does_not_fit_is_rejected_and_names_the_field(start: Start) -> None:
    worker = start("def f(texts: list[str]): print('reached')")
    kind, error = worker.failure(b'{"texts": ["a", 1]}')
    assert (kind, error.code, error.field) == ("rejected", "invalid_input", "texts[1]")
    assert worker.logs == []


def test_an_unencodable_result_names_the_place_and_the_value(start: Start) -> None:
    worker = start("class Thing: pass\ndef f(): return {'rows': [1, Thing()]}")
    kind, error = worker.failure()
    assert (kind, error.code) == ("raised", "result_not_encodable")
    for fact in (".rows[1]", "app.Thing", "application/json"):
        assert fact in error.message


def test_a_result_above_the_limit_is_reported_with_its_size(start: Start) -> None:
    worker = start("def f(): return bytes(65 << 20)")
    _, error = worker.failure()
    assert "68,157,440 bytes" in error.message
    assert "7,864,320" in error.message


def test_an_item_that_cannot_be_sent_is_called_an_item(start: Start) -> None:
    for item, said in (("bytes(8 << 20)", "the item takes 8,388,608 bytes"), ("{1: object()}", "the item at [1] is")):
        worker = start(f"def f(): yield {item}", kind="generator")
        _, error = worker.failure(stream=True, credits=1)
        assert error.message.startswith(said)


def test_a_segfault_disconnects_and_leaves_its_stack_in_the_output(start: Start) -> None:
    worker = start("import ctypes\ndef f(): ctypes.string_at(0)")
    worker.run()
    with pytest.raises(EOFError):
        worker.next()
    assert worker.wait() == -11
    assert 'app.py", line 2 in f' in worker.printed()


def test_os_exit_disconnects(start: Start) -> None:
    worker = start("import os\ndef f(): os._exit(7)")
    worker.run()
    with pytest.raises(EOFError):
        worker.next()
    assert worker.wait() == 7


def test_a_child_that_the_code_forks_neither_holds_the_socket_nor_breaks_it(start: Start) -> None:
    worker = start(
        """
        import os, signal
        def f():
            pid = os.fork()
            if pid == 0:
                print("from the child", flush=True)
                signal.pause()
            os.kill(pid, signal.SIGTERM)
            return os.waitpid(pid, 0)[1]
        """
    )
    assert worker.call() == b"15"
    assert worker.logs == []


@pytest.mark.parametrize(
    ("end", "status"), [("return", 0), ("sys.exit(3)", 3), ("sys.exit('no')", 1), ("raise ValueError", 1)]
)
def test_a_child_that_the_code_forks_ends_with_its_call(start: Start, end: str, status: int) -> None:
    """Regression: it waited for calls forever, and ran its parent's queued calls a second time."""
    worker = start(
        f"""
        import os, sys
        def f():
            pid = os.fork()
            if pid == 0:
                {end}
            return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        """
    )
    assert worker.call() == str(status).encode()
    assert ("ValueError" in worker.printed()) == ("ValueError" in end)


@pytest.mark.parametrize(("end", "status"), [("return", 0), ("sys.exit(3)", 3), ("raise ValueError", 1)])
def test_so_does_one_of_an_async_call(start: Start, end: str, status: int) -> None:
    worker = start(
        f"""
        import asyncio, os, sys
        async def f():
            pid = os.fork()
            if pid == 0:
                {end}
            return os.waitstatus_to_exitcode((await asyncio.to_thread(os.waitpid, pid, 0))[1])
        """,
        kind="async",
    )
    assert worker.call() == str(status).encode()


@pytest.mark.parametrize(("end", "status"), [("return", 0), ("yield 1", 0), ("raise ValueError", 1)])
@pytest.mark.parametrize("kind", ["generator", "async_generator"])
def test_so_does_one_of_a_stream(start: Start, kind: str, end: str, status: int) -> None:
    """Regression: the child of an async function read events of its parent's loop, which then missed them."""
    worker = start(
        f"""
        import os
        {"async " if kind == "async_generator" else ""}def f():
            pid = os.fork()
            if pid == 0:
                {end}
                return
            yield os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        """,
        kind=kind,
    )
    for _ in range(3):
        assert worker.call() == f"[{status}]".encode()


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_so_does_one_of_a_batch(start: Start, kind: str) -> None:
    worker = start(
        f"""
        import os
        {"async " if kind == "async" else ""}def f(x: list[int]):
            pid = os.fork()
            if pid == 0:
                return x
            return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for _ in x]
        """,
        kind=kind,
        batch=Batch(max_size=2, max_wait_ms=1),
    )
    assert worker.call(b'{"x": 1}') == b"0"


@pytest.mark.parametrize(
    "body",
    [
        "def __init__(self): fork()",
        "@enter\n    def begin(self): fork()",
        "@enter\n    async def begin(self): fork()",
    ],
    ids=["constructor", "hook", "async hook"],
)
def test_so_does_one_of_a_start(start: Start, body: str) -> None:
    worker = start(
        f"""
import os
from gpufn import enter
children = []
def fork():
    pid = os.fork()
    if pid:
        children.append(pid)
class C:
    {body}
    def f(self): return os.waitstatus_to_exitcode(os.waitpid(children[0], 0)[1])
""",
        qualname="C",
        methods={"f": "sync"},
    )
    assert worker.call(method="f") == b"0"


def test_logs_of_a_child_with_the_setup_of_its_parent_are_not_lost(start: Start) -> None:
    """A handler holds the stream that replaced stderr when it was created, which no thread of a child reads."""
    worker = start(
        """
        import logging, multiprocessing, sys
        logging.basicConfig(level=logging.INFO)
        out = sys.stdout
        def say(x):
            logging.info("from %s", x)
            out.write(f"to {x}\\n")
            out.flush()
        def f():
            with multiprocessing.get_context("fork").Pool(1) as pool:
                pool.map(say, ["a pool"])
        """
    )
    assert worker.call() == b"null"
    assert "INFO:root:from a pool" in worker.printed()
    assert "to a pool" in worker.printed()


def test_a_child_that_the_code_forks_gets_an_error_for_platform_calls(start: Start) -> None:
    """Regression: it waited forever for a response, and its parent waited for it."""
    worker = start(
        """
        import gpufn.call.transport, multiprocessing
        from gpufn.call.transport_protocol import EncodedCall, Target
        def ask(x):
            try:
                return gpufn.call.transport.current().call(EncodedCall(Target("other"), "", b""))
            except Exception as error:
                return str(error)
        def f():
            with multiprocessing.get_context("fork").Pool(1) as pool:
                return pool.map(ask, [1])
        """
    )
    assert worker.call().startswith(b'["a process forked by the function cannot send requests to the platform')


def test_if_no_thread_can_start_the_calls_run_in_existing_ones(start: Start) -> None:
    """Regression: the worker kept running without receiving anything."""
    worker = start(
        """
        import os, pathlib, threading, time
        def refuse(self):
            pathlib.Path("refused").touch()
            raise RuntimeError("can't start new thread")
        threading.Thread.start = refuse
        def f(wait: bool = False):
            while wait and not os.path.exists("refused"):
                time.sleep(0.002)
        """,
        concurrency=2,
    )
    first, second = worker.run(b'{"wait": true}'), worker.run()
    assert [worker.result()[0].attempt for _ in range(2)] == [first, second]
    assert worker.call() == b"null"


@pytest.mark.parametrize(
    ("source", "kind"),
    [
        (
            """
            import threading
            from gpufn_runtime.worker.execute.results import Results
            def refuse(*_): raise MemoryError
            Results.returned = refuse
            together = threading.Barrier(2)
            def f():
                together.wait()
                if threading.current_thread() is threading.main_thread():
                    threading.Event().wait()
            """,
            "sync",
        ),
        (
            """
            import asyncio
            def refuse(): raise MemoryError
            async def f():
                asyncio.get_running_loop()._run_once = refuse
                await asyncio.sleep(60)
            """,
            "async",
        ),
    ],
    ids=["user thread", "event loop"],
)
def test_a_thread_that_fails_beside_its_call_ends_the_worker(start: Start, source: str, kind: str) -> None:
    """Regression: the call, and later ones, ran into their timeouts."""
    worker = start(source, kind=kind, concurrency=2)
    worker.run()
    worker.run()
    with pytest.raises(EOFError):
        worker.next()
    assert worker.wait() == 1
    assert "MemoryError" in worker.printed()


def test_a_signal_handler_that_raises_between_two_calls_ends_the_worker(start: Start) -> None:
    """An alarm that is set in a call and arrives after it. Regression: a thread of user code kept the process, which
    received calls and ran none of them."""
    worker = start(
        """
        import signal, threading
        def late(*_): raise RuntimeError("too late")
        def f():
            signal.signal(signal.SIGUSR1, late)
            threading.Thread(target=threading.Event().wait).start()
        """
    )
    assert worker.call() == b"null"
    worker.process.send_signal(signal.SIGUSR1)
    with pytest.raises(EOFError):
        worker.next()
    assert worker.wait() == 1
    assert "RuntimeError: too late" in worker.printed()


def test_a_worker_that_cannot_receive_any_more_closes_its_connection(start: Start) -> None:
    worker = start(
        """
        from gpufn_runtime.worker.execute.attempts import Attempts
        def refuse(*_): raise MemoryError
        Attempts.add = refuse
        def f(): ...
        """
    )
    worker.run()
    with pytest.raises(EOFError):
        worker.next()
    assert worker.wait() == 4
    assert "MemoryError" in worker.printed()


def test_only_one_result_is_sent_for_an_attempt(start: Start) -> None:
    worker = start("def f(): return 1")
    numbers = [worker.run() for _ in range(50)]
    got = [worker.next()[0] for _ in numbers]
    assert [frame.attempt for frame in got if isinstance(frame, Result)] == numbers


def test_a_pool_of_processes_works_inside_a_function(start: Start) -> None:
    worker = start(
        """
        import logging, multiprocessing
        def square(x):
            print("in the pool")
            logging.warning("in the pool")
            return x * x
        def f():
            print("before")
            with multiprocessing.get_context("fork").Pool(2) as pool:
                return pool.map(square, range(4))
        """
    )
    assert worker.call() == b"[0,1,4,9]"
    assert worker.logs == [(1, "stdout", "before")]
    assert worker.call() == b"[0,1,4,9]"
