"""Compilation in the background: after the unpacking, one bundle at a time, and only bundles for which it pays."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
from collections.abc import AsyncGenerator, Callable, Iterable
from pathlib import Path

from gpufn_core.errors import ArtifactUnavailable
from gpufn_runtime.agent.bytecode.added import AddedBytecode

log = logging.getLogger(__name__)

OWN_VERSION = "{}.{}".format(*sys.version_info)
# Less takes at most 2.5 ms of a start. A compilation costs 0.1 s of a core.
LEAST_SOURCE_BYTES = 4 << 10

Compile = Callable[[Path, Iterable[str], str], AsyncGenerator[tuple[str, bytes], None]]


class BackgroundCompiler:
    """Compiles what `request` asks for, while `run` runs."""

    def __init__(self, compile_files: Compile) -> None:
        self._compile = compile_files
        self._queue: asyncio.Queue[tuple[AddedBytecode, str]] = asyncio.Queue()
        self.has_child_processes = False

    def request(self, bytecode: AddedBytecode, version: str) -> None:
        """Compile the bundle later for a version of Python, once."""
        if version not in bytecode.versions:
            bytecode.versions.add(version)
            self._queue.put_nowait((bytecode, version))

    async def run(self) -> None:
        while True:
            bytecode, version = await self._queue.get()
            try:
                await self._add(bytecode, version)
            except (ArtifactUnavailable, OSError) as error:  # starts compile for themselves
                log.info("bundle %s is not compiled for Python %s: %s", bytecode.bundle.name[:12], version, error)
            except Exception:
                log.exception("bundle %s is not compiled for Python %s", bytecode.bundle.name[:12], version)

    async def _add(self, bytecode: AddedBytecode, version: str) -> None:
        sources = await asyncio.to_thread(bytecode.missing, version)
        if sum(sources.values()) < LEAST_SOURCE_BYTES:
            return
        self.has_child_processes = True
        try:
            async with contextlib.aclosing(self._compile(bytecode.bundle, sources, version)) as files:
                async for name, data in files:
                    await asyncio.to_thread(bytecode.add, name, version, data)
        finally:
            self.has_child_processes = False
