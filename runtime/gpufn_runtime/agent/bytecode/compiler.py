"""Compilation of a bundle by a process in a sandbox, at the lowest priority.

Sources are untrusted, and the compiler is a large C program. So its process reads the bundle, writes to no file and has
no network. The agent chooses the names of the files, and reads no more than a limit. A process that ends early, or
takes too long, leaves the rest of the files without byte code.

The interpreter is one of the node, never an environment's: teams share bundles, and a team can put any code into its
environment.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import subprocess
from collections.abc import AsyncGenerator, Iterable, Mapping
from pathlib import Path

from gpufn_runtime.agent.bytecode import program
from gpufn_runtime.agent.environments.interpreters import Interpreter, find_interpreter
from gpufn_runtime.agent.isolation import confined_command
from gpufn_runtime.agent.isolation.sandboxes import Sandboxes
from gpufn_runtime.agent.workers.cgroups import MemoryGroups
from gpufn_runtime.agent.workers.environment import import_roots

log = logging.getLogger(__name__)

_TIMEOUT_S = 60.0
_MEMORY_BYTES = 512 << 20
_MAX_BYTES = 64 << 20  # of all byte code of a bundle
_LARGEST_FILE_BYTES = 16 << 20


class _TooLarge(Exception):
    """The byte code exceeds a limit."""


_REASONS = {TimeoutError: f"it took longer than {_TIMEOUT_S:g} s", _TooLarge: "its byte code is too large"}


class Compiler:
    """`environ` is the environment of the agent."""

    def __init__(self, sandboxes: Sandboxes, groups: MemoryGroups, environ: Mapping[str, str]) -> None:
        self._sandboxes = sandboxes
        self._groups = groups
        self._environ = environ
        self._interpreters: dict[str, Interpreter] = {}

    async def compile(
        self, bundle: Path, sources: Iterable[str], version: str
    ) -> AsyncGenerator[tuple[str, bytes], None]:
        """Yield the byte code of each source that can be compiled. Raises ArtifactUnavailable, OSError."""
        interpreter = await self._interpreter(version)
        group = self._groups.create_for(bundle, _MEMORY_BYTES)
        try:
            process = await confined_command.start(
                [interpreter.executable, "-I", "-S", program.__file__],
                sandbox=self._sandboxes.compiler(os.fspath(bundle), interpreter.prefix),
                group=group,
                memory_bytes=_MEMORY_BYTES,
                environment={**self._libraries(), **import_roots(), "LANG": "C.UTF-8"},
                folder=bundle,
                stdin=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                has_low_priority=True,
            )
            try:
                async with contextlib.aclosing(_results(process, bundle, list(sources))) as results:
                    async for name, data in results:
                        yield name, data
            finally:
                await confined_command.end(process, group)
        finally:
            if group is not None:
                group.remove()

    async def _interpreter(self, version: str) -> Interpreter:
        if version not in self._interpreters:
            path = self._environ.get("PATH", os.defpath)
            self._interpreters[version] = await asyncio.to_thread(find_interpreter, version, path)
        return self._interpreters[version]

    def _libraries(self) -> dict[str, str]:
        return {name: self._environ[name] for name in ("LD_LIBRARY_PATH",) if name in self._environ}


async def _results(
    process: asyncio.subprocess.Process, bundle: Path, sources: list[str]
) -> AsyncGenerator[tuple[str, bytes], None]:
    assert process.stdin is not None
    assert process.stdout is not None
    deadline = asyncio.get_running_loop().time() + _TIMEOUT_S
    remaining = _MAX_BYTES
    name = sources[0]
    try:
        async with asyncio.timeout_at(deadline):
            process.stdin.write(b"\0".join(os.fsencode(bundle / name) for name in sources))
            await process.stdin.drain()
        process.stdin.close()
        for name in sources:
            async with asyncio.timeout_at(deadline):
                data = await _record(process.stdout, min(remaining, _LARGEST_FILE_BYTES))
            remaining -= len(data)
            if data:
                yield name, data
    except (TimeoutError, _TooLarge, asyncio.IncompleteReadError, ConnectionError) as error:
        reason = _REASONS.get(type(error), "the compiler ended")
        log.warning("bundle %s is compiled in part only: %s at %s", bundle.name[:12], reason, name)


async def _record(stream: asyncio.StreamReader, limit: int) -> bytes:
    size = int.from_bytes(await stream.readexactly(4), "big")
    if size > limit:
        raise _TooLarge
    return await stream.readexactly(size)
