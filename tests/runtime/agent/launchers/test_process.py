"""Cold starts of workers that move into a PID namespace, with programs that stand for the worker."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import pytest

from gpufn_core.protocol.launch import PID_VARIABLE, Sandbox, WorkerConfig
from gpufn_core.spec.function_spec import EntryPoint, FunctionSpec, MethodSpec
from gpufn_runtime.agent.launchers.base import LaunchOrder
from gpufn_runtime.agent.launchers.process import ProcessLauncher
from gpufn_runtime.agent.workers import processes
from tests.waiting import until

REPORT = f"os.write(int(os.environ['{PID_VARIABLE}']), str(child).encode())"
MOVES = f"""
import os, signal
if child := os.fork():
    {REPORT}
    os._exit(0)
os.setsid()
signal.pause()
"""
MOVES_WITHOUT_REPORT = """
import os, signal
child = os.fork()
if child == 0:
    os.setsid()
signal.pause()
"""
DOES_NOT_MOVE = f"""
import os, signal
os.close(int(os.environ["{PID_VARIABLE}"]))
signal.pause()
"""


def order(folder: Path) -> LaunchOrder:
    output = folder / "w-1" / "output"
    output.parent.mkdir()
    os.mkfifo(output)
    config = WorkerConfig(
        worker="w-1",
        function="f",
        revision=1,
        spec=FunctionSpec(name="f", entry=EntryPoint("app", "f"), methods=(MethodSpec(),)),
        bundle_dir=os.fspath(folder),
        socket="",
        launched_at=1.0,
        sandbox=Sandbox(own_pids=True),
    )
    return LaunchOrder("w-1", folder, folder / "config.json", output, dict(os.environ), config)


def launched(wanted: LaunchOrder, source: str) -> int:
    return asyncio.run(ProcessLauncher((sys.executable, "-c", source)).launch(wanted)).pid


@pytest.mark.parametrize("source", [MOVES, DOES_NOT_MOVE], ids=["moves", "does not move"])
def test_the_worker_is_the_process_that_goes_on(tmp_path: Path, source: str) -> None:
    wanted = order(tmp_path)
    pid = launched(wanted, source)
    until(lambda: len(processes.writing_to(wanted.output)) == 1)  # the first process ends a moment after its report
    [worker] = processes.writing_to(wanted.output)
    assert worker.pid == pid
    processes.kill(worker)


def test_a_process_that_ends_before_it_moves_is_the_worker(tmp_path: Path) -> None:
    pid = launched(order(tmp_path), "raise SystemExit(7)")
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7


def test_a_cancelled_launch_leaves_no_worker(tmp_path: Path) -> None:
    """Bug: only the first process was killed."""
    wanted = order(tmp_path)

    async def cancel() -> None:
        launch = asyncio.create_task(ProcessLauncher((sys.executable, "-c", MOVES_WITHOUT_REPORT)).launch(wanted))
        await asyncio.to_thread(until, lambda: len(processes.writing_to(wanted.output)) == 2)
        launch.cancel()
        with pytest.raises(asyncio.CancelledError):
            await launch

    asyncio.run(cancel())
    until(lambda: not processes.writing_to(wanted.output))
