"""Background tasks."""

from __future__ import annotations

import asyncio

import pytest

from gpufn_platform.process.tasks import Tasks


def test_a_failure_is_logged_under_its_name_and_ends_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    done: list[str] = []

    async def fail() -> None:
        raise ValueError("on purpose")

    async def work() -> None:
        done.append("work")

    async def run() -> None:
        tasks = Tasks("of all")
        tasks.start(fail())
        tasks.start(fail(), "its own")
        tasks.start(work())
        await tasks.done()
        assert len(tasks) == 0

    asyncio.run(run())
    assert done == ["work"]
    assert sorted(record.message for record in caplog.records) == ["its own failed", "of all failed"]


def test_tasks_started_by_a_task_are_awaited_as_well() -> None:
    done: list[str] = []

    async def run() -> None:
        tasks = Tasks("test")

        async def second() -> None:
            done.append("second")

        async def first() -> None:
            tasks.start(second())

        tasks.start(first())
        await tasks.done()

    asyncio.run(run())
    assert done == ["second"]


def test_an_end_waits_for_the_cleanup_of_a_cancelled_task(caplog: pytest.LogCaptureFixture) -> None:
    done: list[str] = []

    async def linger() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            done.append("tidied")

    async def run() -> None:
        tasks = Tasks("test")
        tasks.start(linger())
        await asyncio.sleep(0)  # it is waiting
        await tasks.end()

    asyncio.run(run())
    assert done == ["tidied"]
    assert not caplog.records
