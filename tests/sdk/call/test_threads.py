"""Calls in threads, as `.aio` and coroutines in a running event loop use them."""

from __future__ import annotations

import asyncio
import contextvars
import subprocess
import sys
import threading

import pytest

from gpufn.call.threads import Outcome, _ThreadPool, in_thread, run_coroutine

LEAVES = """
import asyncio, threading
from gpufn.call.threads import in_thread

async def main():
    try:
        await asyncio.wait_for(in_thread(threading.Event().wait), 0.1)
    except TimeoutError:
        print("left")

asyncio.run(main())
"""


def test_a_call_that_is_no_longer_awaited_does_not_keep_the_program_alive() -> None:
    ended = subprocess.run([sys.executable, "-c", LEAVES], capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "left\n", "")


def test_many_calls_run_at_a_time_and_threads_are_reused() -> None:
    seen: set[str] = set()

    async def main() -> None:
        for _ in range(20):
            together = threading.Barrier(20)
            await asyncio.gather(*(in_thread(meet, together) for _ in range(20)))

    def meet(together: threading.Barrier) -> None:
        together.wait(30)
        seen.add(threading.current_thread().name)

    asyncio.run(main())
    assert 20 <= len(seen) <= 128


def test_a_thread_is_started_only_if_all_are_busy() -> None:
    """Regression: an idle thread whose work a busy one had taken was not counted again. In the end there were 128."""
    seen: set[str] = set()
    pool = _ThreadPool(128)

    def one_after_another(remaining: int, ended: threading.Event) -> None:
        def callback(caught: Outcome[threading.Thread]) -> None:
            seen.add(caught.get().name)
            one_after_another(remaining - 1, ended)

        if remaining:
            pool.run(threading.current_thread, callback)
        else:
            ended.set()

    ends = [threading.Event() for _ in range(4)]
    for end in ends:
        one_after_another(500, end)
    assert all(end.wait(30) for end in ends)
    assert len(seen) <= 4


AFTER_A_FORK = """
import asyncio, os
from gpufn.call.threads import in_thread

assert asyncio.run(in_thread(os.getpid)) == os.getpid()
child = os.fork()
if child == 0:
    os._exit(asyncio.run(asyncio.wait_for(in_thread(os.getpid), 20)) != os.getpid())
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_forked_child_has_threads_of_its_own() -> None:
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", AFTER_A_FORK]  # about a fork with threads
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (ended.stdout, ended.stderr) == ("0\n", "")


def test_context_is_passed_and_errors_are_raised() -> None:
    name: contextvars.ContextVar[str] = contextvars.ContextVar("name")

    async def main() -> None:
        name.set("mine")
        assert await in_thread(name.get) == "mine"
        with pytest.raises(ZeroDivisionError):
            await in_thread(lambda: 1 / 0)
        assert run_coroutine(asyncio.sleep(0, "slept")) == "slept"

    asyncio.run(main())
    assert run_coroutine(asyncio.sleep(0, "slept")) == "slept"
