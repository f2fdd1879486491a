"""Output and log records are attributed to the attempt that made them, and limited."""

from __future__ import annotations

import re
from typing import Any

Start = Any


def test_lines_belong_to_the_attempt_that_printed_them(start: Start) -> None:
    worker = start(
        """
        import sys
        print("loading")
        def f(x: int):
            print("x is", x)
            print("no end", end="")
            sys.stderr.write("oops\\n")
            sys.stdout.buffer.write(b"bytes\\n")
        """
    )
    for x in (7, 8):
        worker.call(b'{"x": %d}' % x)
    assert worker.logs == [
        (0, "stdout", "loading"),
        (1, "stdout", "x is 7"), (1, "stderr", "oops"), (1, "stdout", "no endbytes"),
        (2, "stdout", "x is 8"), (2, "stderr", "oops"), (2, "stdout", "no endbytes"),
    ]  # fmt: skip


def test_a_script_may_request_utf8(start: Start) -> None:
    worker = start(
        """
        import sys
        for stream in (sys.stdout, sys.stderr):
            stream.reconfigure(encoding="utf-8", line_buffering=True)
        def f(): print("größer")
        """
    )
    worker.call()
    assert worker.logs == [(1, "stdout", "größer")]


def test_lines_of_concurrent_async_calls_belong_to_their_calls(start: Start) -> None:
    worker = start(
        """
        import asyncio
        async def f(name: str):
            for i in range(2):
                print(name, end="")
                await asyncio.sleep(0)
                print(i)
        """,
        kind="async",
        concurrency=2,
    )
    worker.run(b'{"name": "a"}')
    worker.run(b'{"name": "b"}')
    worker.result()
    worker.result()
    assert sorted(worker.logs) == [
        (1, "stdout", "a0"), (1, "stdout", "a1"), (2, "stdout", "b0"), (2, "stdout", "b1"),
    ]  # fmt: skip


def test_log_records_are_one_message_each(start: Start) -> None:
    worker = start(
        """
        import logging
        def f():
            try:
                1 / 0
            except ZeroDivisionError:
                logging.getLogger("mine").exception("failed")
        """
    )
    worker.call()
    [(attempt, stream, text)] = worker.logs
    assert (attempt, stream, text.splitlines()[0]) == (1, "log", "ERROR mine: failed")
    assert text.splitlines()[-1] == "ZeroDivisionError: division by zero"


def test_logging_that_a_call_configures_is_configured_as_requested(start: Start) -> None:
    worker = start(
        """
        import logging
        def f():
            logging.basicConfig(level=logging.INFO, format="%(levelname)s: %(message)s")
            logging.info("this one")
        """
    )
    worker.call()
    assert worker.logs == [(1, "stderr", "INFO: this one")]


def test_a_record_that_the_codes_own_handler_writes_is_logged_once(start: Start) -> None:
    worker = start(
        """
        import logging, sys
        mine = logging.getLogger("mine")
        mine.addHandler(logging.StreamHandler(sys.stdout))
        def f():
            mine.warning("once")
            logging.getLogger("other").setLevel(logging.INFO)
            logging.getLogger("other").info("other's")
        """
    )
    worker.call()
    assert worker.logs == [(1, "stdout", "once"), (1, "log", "INFO other: other's")]


def test_a_flood_is_cut_and_counted(start: Start) -> None:
    worker = start(
        """
        def f():
            for _ in range(40): print("y" * 999_999)
            for _ in range(4): print(("y" * 16_000 + "\\n") * 1000)
        """
    )
    worker.call()
    sent = sum(len(text) for _, _, text in worker.logs)
    assert sent < 16 << 20
    assert max(len(text) for _, _, text in worker.logs) < 17_000
    assert any(re.search(r"\d+ lines .* dropped: .* 1 MiB", text) for _, _, text in worker.logs)
    assert worker.call() == b"null"


def test_a_progress_bar_is_one_line(start: Start) -> None:
    worker = start("def f():\n    for i in range(101): print(f'\\r{i}%', end='')\n    print()")
    worker.call()
    assert worker.logs == [(1, "stdout", "100%")]


def test_a_print_in_a_signal_handler_and_a_finalizer_does_no_harm(start: Start) -> None:
    worker = start(
        """
        import signal
        class Loud:
            def __del__(self): print("gone")
        def f():
            signal.signal(signal.SIGALRM, lambda *_: print("tick"))
            signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
            for i in range(3000):
                print(i)
                Loud()
            signal.setitimer(signal.ITIMER_REAL, 0)
            return True
        """
    )
    assert worker.call() == b"true"
