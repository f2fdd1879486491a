"""Creation of an environment by uv, in its own sandbox.

1. an empty environment with an interpreter of the node
2. the packages of the lock: hashes are required, and only wheels are accepted, so no code of a package runs
3. bytecode, by an interpreter that runs no code of the packages: workers cannot write it. The packages' tests, more
   than half of the code of some packages, have none
4. the image's commands

A package without a wheel is built by its own code, and commands run any code. Then uv has no cache that other
environments use, and the sandbox can write to the new environment only. The processes of a step end with it, and have
limits of memory and of disk space together.
"""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from gpufn_core.errors import ArtifactUnavailable, BuildFailed
from gpufn_core.protocol.launch import Sandbox
from gpufn_core.spec.image_spec import ImageSpec
from gpufn_core.spec.units import format_bytes
from gpufn_platform.process.disk_use import total_bytes
from gpufn_runtime.agent.environments.interpreters import Interpreter
from gpufn_runtime.agent.isolation import confined_command
from gpufn_runtime.agent.workers.cgroups import MemoryGroups
from gpufn_runtime.agent.workers.environment import import_roots

OnLine = Callable[[str], None]

_SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_MAX_LINES = 200
_STEP_TIMEOUT_S = 1800.0  # a process that keeps the output open counts too
_LONGEST_LINE = 4 << 10
# Variables of the agent that uv reads: its settings, certificates and proxies.
_PASSED = ("UV_", "SSL_CERT_", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY", "LD_LIBRARY_PATH")
_FOLDERS_OF_PACKAGES = ("UV_FIND_LINKS", "UV_INDEX", "UV_DEFAULT_INDEX", "UV_INDEX_URL", "UV_EXTRA_INDEX_URL")
_BUILD_MEMORY_BYTES = 1 << 30
_BEYOND_BYTES = 1 << 20  # a file that reaches the limit of files exceeds the limit of the build, which the error names
_COMPILERS = 8  # processes that compile bytecode
_TESTS = "/site-packages/.*/tests/"  # files that are not compiled
_MEASURE_S = 2.0  # between two looks at the disk space of a build


@dataclass(frozen=True)
class Confinement:
    """The sandbox of a build: the files that it may not see, and whether the kernel allows namespaces."""

    hidden: tuple[str, ...]
    namespaces: bool


@dataclass(frozen=True)
class Limits:
    """Limits of all processes of a step together. Without `groups` each process has the limit of memory."""

    memory_bytes: int
    disk_bytes: int
    groups: MemoryGroups


class _TooLarge(Exception):
    """The files of a build exceed the limit."""


@dataclass(frozen=True)
class Build:
    """One environment to make. `target` is the folder to fill, `lock` the file of its packages. `shared` is the folder
    that `target` and `cache`, the cache of uv, are in. Without `confinement` there is no sandbox."""

    spec: ImageSpec
    lock: Path
    target: Path
    shared: Path
    cache: Path
    uv: str
    interpreter: Interpreter
    confinement: Confinement | None
    environ: Mapping[str, str]
    limits: Limits

    @property
    def runs_code(self) -> bool:
        return bool(self.spec.builds or self.spec.commands)

    async def run(self, on_line: OnLine) -> None:
        """Raises BuildFailed, ArtifactUnavailable."""
        await self._step(
            "create the environment",
            [
                *(self.uv, "venv", "--allow-existing", "--relocatable", "--quiet"),
                *("--python", self.interpreter.executable, self._path("")),
            ],
            on_line,
        )
        wheels_only = () if self.spec.builds else ("--only-binary", ":all:")
        install = ("pip", "install", "--require-hashes", *wheels_only, "--no-progress", "--color=never")
        python = ("--python", self._path("bin/python"))
        await self._step(
            "install the packages", [self.uv, *install, *python, "-r", os.fspath(self.lock)], on_line, is_online=True
        )
        on_line("compile bytecode")
        processes = str(min(_COMPILERS, len(os.sched_getaffinity(0))))
        compile_all = ("-I", "-S", "-m", "compileall", "-q", "-q", "-j", processes, "-x", _TESTS, self._path("lib"))
        await self._step("compile", [self.interpreter.executable, *compile_all], on_line, may_fail=True)
        for command in self.spec.commands:
            on_line(f"run {command}")
            await self._step(f"run {command!r}", ["/bin/sh", "-c", command], on_line, is_online=True, is_user=True)

    def _path(self, name: str) -> str:
        return os.path.join(self.target, name) if name else os.fspath(self.target)

    async def _step(
        self,
        what: str,
        command: Sequence[str],
        on_line: OnLine,
        *,
        is_online: bool = False,
        may_fail: bool = False,
        is_user: bool = False,
    ) -> None:
        scratch = self.target / ".tmp"
        scratch.mkdir(parents=True, exist_ok=True)
        environment = self._environment(scratch, is_online=is_online, is_user=is_user)
        group = self.limits.groups.create_for(self.target, self.limits.memory_bytes)
        try:
            process = await confined_command.start(
                command,
                sandbox=None if self.confinement is None else self._sandbox(network=is_online),
                group=group,
                memory_bytes=self.limits.memory_bytes,
                file_bytes=self.limits.disk_bytes + _BEYOND_BYTES,
                environment=environment,
                folder=self.target,
            )
        except OSError as error:
            raise ArtifactUnavailable(f"Cannot {what}: {error.strerror}.") from error
        lines: deque[str] = deque(maxlen=_MAX_LINES)
        reason, code = "", 0
        try:
            code = await self._watched(process, lines, on_line)
        except TimeoutError:
            reason = f"it took longer than {_STEP_TIMEOUT_S:g} s"
        except _TooLarge:
            reason = f"its files exceed {format_bytes(self.limits.disk_bytes)} (GPUFN_IMAGE_BUILD_DISK)"
        finally:
            await confined_command.end(process, group)
            has_no_memory = group is not None and group.has_killed()
            if group is not None:
                group.remove()
        if has_no_memory:
            reason = f"it needs more memory than {format_bytes(self.limits.memory_bytes)} (GPUFN_IMAGE_BUILD_MEMORY)"
        elif not reason and code and not may_fail:
            reason = _reason(lines, code)
        if reason:
            raise BuildFailed(f"cannot {what}: {reason}", stage="packages", log="\n".join(lines))

    async def _watched(self, process: asyncio.subprocess.Process, lines: deque[str], on_line: OnLine) -> int:
        """Read the output and return the exit code. Raises TimeoutError, _TooLarge."""
        reading = asyncio.create_task(_read(process, lines, on_line))
        try:
            async with asyncio.timeout(_STEP_TIMEOUT_S):
                while not reading.done():
                    await asyncio.wait([reading], timeout=_MEASURE_S)
                    if await asyncio.to_thread(total_bytes, self.target) > self.limits.disk_bytes:
                        raise _TooLarge
            return reading.result()
        finally:
            reading.cancel()

    def _environment(self, scratch: Path, *, is_online: bool, is_user: bool) -> dict[str, str]:
        passed = {
            name: value
            for name, value in self.environ.items()
            if name.upper().startswith(_PASSED) and not (is_user and name.startswith("UV_"))
        }
        return {
            **passed,
            **import_roots(),
            "PATH": f"{self._path('bin')}:{os.path.dirname(self.uv)}:{_SYSTEM_PATH}",
            "HOME": os.fspath(scratch),
            **({"TMPDIR": os.fspath(scratch)} if is_online else {}),  # not for sockets of Python's own processes
            "LANG": "C.UTF-8",
            "VIRTUAL_ENV": self._path(""),
            "UV_CACHE_DIR": os.fspath(scratch / "uv" if self.runs_code else self.cache),
            "UV_PYTHON_DOWNLOADS": "never",
            "PYTHONDONTWRITEBYTECODE": "1",
        }

    def _sandbox(self, *, network: bool) -> Sandbox:
        assert self.confinement is not None
        folders = (folder for name in _FOLDERS_OF_PACKAGES for folder in _local_folders(self.environ.get(name, "")))
        libraries = (path for path in self.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep) if os.path.isabs(path))
        readable = (self.interpreter.prefix, os.path.dirname(self.uv), *folders, *libraries)
        return Sandbox(
            readable=(*dict.fromkeys(filter(os.path.exists, readable)), os.fspath(self.lock)),
            writable=(self._path(""),) if self.runs_code else (os.fspath(self.shared),),
            hidden=self.confinement.hidden,
            memory_bytes=_BUILD_MEMORY_BYTES,
            network=network or not self.confinement.namespaces,
            namespaces=self.confinement.namespaces,
            is_command=True,
        )


async def _read(process: asyncio.subprocess.Process, lines: deque[str], on_line: OnLine) -> int:
    assert process.stdout is not None
    while line := await _line(process.stdout):
        text = line.decode(errors="replace").rstrip()[:_LONGEST_LINE]
        if text:
            lines.append(text)
            on_line(text)
    return await process.wait()


async def _line(stream: asyncio.StreamReader) -> bytes:
    try:
        return await stream.readuntil(b"\n")
    except asyncio.IncompleteReadError as end:
        return end.partial
    except asyncio.LimitOverrunError as error:
        return await stream.readexactly(error.consumed)


def _local_folders(setting: str) -> list[str]:
    """Return the folders in a list of indexes.

    >>> _local_folders("https://pypi.org/simple file:///srv/wheels,/opt/more")
    ['/srv/wheels', '/opt/more']
    """
    parts = (part.rpartition("=")[2] for part in setting.replace(",", " ").split())
    paths = (urlsplit(part).path if part.startswith("file:") else part for part in parts)
    return [path for path in paths if path.startswith("/")]


def _reason(lines: Sequence[str], code: int) -> str:
    """Return the message of a failed program: from its first error on, as uv explains in the lines that follow."""
    starts = ("error", "\N{MULTIPLICATION SIGN}")
    first = next((number for number, line in enumerate(lines) if line.lstrip().startswith(starts)), 0)
    return "\n".join(list(lines)[first:][:40]) or f"it ended with code {code}"
