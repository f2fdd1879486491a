"""A command in a sandbox, with limits, that reads users' files: start and end, together with all that it starts."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from gpufn_core.protocol.launch import LIMITS_VARIABLE, SANDBOX_VARIABLE, BuildLimits, Sandbox
from gpufn_runtime.agent.workers.cgroups import MemoryGroup

_END_S = 5.0
_LOWEST_PRIORITY = 19


async def start(
    command: Sequence[str],
    *,
    sandbox: Sandbox | None,
    group: MemoryGroup | None,
    memory_bytes: int,
    file_bytes: int = 0,
    environment: Mapping[str, str],
    folder: Path,
    stdin: int = subprocess.DEVNULL,
    stderr: int = subprocess.STDOUT,
    has_low_priority: bool = False,
) -> asyncio.subprocess.Process:
    """Start the command; its output is in a pipe. Without `group`, each process has the limit of memory. Raises
    OSError."""
    limits = BuildLimits(
        cgroup_procs=os.fspath(group.join_file) if group else "", memory_bytes=memory_bytes, file_bytes=file_bytes
    )
    variables = {**environment, LIMITS_VARIABLE: msgspec.json.encode(limits).decode()}
    if sandbox is not None:
        variables[SANDBOX_VARIABLE] = msgspec.json.encode(sandbox).decode()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "gpufn_platform.sandbox.command", *command),
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=stderr,
        env=variables,
        cwd=folder,
        start_new_session=True,
    )
    if has_low_priority:
        _lower_priority(process.pid)
    return process


def _lower_priority(pid: int) -> None:
    """Give the process, which leads a session, the lowest priority. Some kernels compare the priorities of sessions."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, pid, _LOWEST_PRIORITY)
        Path(f"/proc/{pid}/autogroup").write_text(str(_LOWEST_PRIORITY))


async def end(process: asyncio.subprocess.Process, group: MemoryGroup | None) -> None:
    """End the process, which ends all that it has started, and wait for it."""
    for signum in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError, TimeoutError):
            if process.returncode is None:
                process.send_signal(signum)
            async with asyncio.timeout(_END_S):
                await process.wait()
                break
    if group is not None:
        group.kill()  # the process may have been killed before it could end the others
    transport: Any = process
    transport._transport.close()  # output that was not read keeps it open
