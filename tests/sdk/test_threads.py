"""Work in threads, as `.aio` and coroutines called from a loop use it."""

from __future__ import annotations

import asyncio
import contextvars
import subprocess
import sys
import threading

import pytest

from gpufn._threads import in_thread, run_coroutine

LEAVES = """
import asyncio, threading
from gpufn._threads import in_thread

async def main():
    try:
        await asyncio.wait_for(in_thread(threading.Event().wait), 0.1)
    except TimeoutError:
        print("left")

asyncio.run(main())
"""


def test_a_call_that_nobody_awaits_any_more_does_not_keep_the_program_from_ending() -> None:
    ended = subprocess.run([sys.executable, "-c", LEAVES], capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "left\n", "")


def test_many_run_at_a_time_and_threads_are_used_again() -> None:
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


def test_context_goes_along_and_errors_come_back() -> None:
    name: contextvars.ContextVar[str] = contextvars.ContextVar("name")

    async def main() -> None:
        name.set("mine")
        assert await in_thread(name.get) == "mine"
        with pytest.raises(ZeroDivisionError):
            await in_thread(lambda: 1 / 0)
        assert run_coroutine(asyncio.sleep(0, "slept")) == "slept"

    asyncio.run(main())
    assert run_coroutine(asyncio.sleep(0, "slept")) == "slept"
