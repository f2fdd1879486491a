"""Byte code of bundles: what the agent adds, with a compiler of its own or a stand-in."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import stat
import subprocess
import sys
from collections.abc import AsyncGenerator, Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from gpufn_core.home import Home
from gpufn_platform.sandbox.host_paths import own_python_folders
from gpufn_platform.sandbox.support import probe
from gpufn_runtime.agent.bytecode import compiler as compiler_module
from gpufn_runtime.agent.bytecode import program
from gpufn_runtime.agent.bytecode.added import AddedBytecode
from gpufn_runtime.agent.bytecode.background import LEAST_SOURCE_BYTES, OWN_VERSION, BackgroundCompiler
from gpufn_runtime.agent.bytecode.compiler import Compiler
from gpufn_runtime.agent.isolation.sandboxes import Sandboxes
from gpufn_runtime.agent.workers.cgroups import MemoryGroups
from gpufn_runtime.agent.workers.environment import worker_packages
from tests.conftest import missing
from tests.waiting import until_async

LARGE = "VALUE = 1\n" + "# text\n" * LEAST_SOURCE_BYTES
# The import fails if Python compiles the source.
IMPORT = "import builtins, sys; sys.path.insert(0, '.'); import pkg.mod; print(pkg.mod.VALUE, pkg.mod.__cached__)"


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    folder = Home(tmp_path).bundles / "digest"
    (folder / "pkg").mkdir(parents=True)
    (folder / "pkg" / "__init__.py").touch()
    (folder / "pkg" / "mod.py").write_text(LARGE)
    return folder


def compiler(home: Path, groups: MemoryGroups | None = None) -> Compiler:
    support = probe()
    sandboxes = Sandboxes(
        Home(home),
        own_python_folders(map(os.path.dirname, worker_packages()), os.environ),
        packages=tuple(worker_packages()),
        namespaces=not support.namespaces,
    )
    return Compiler(sandboxes, groups or MemoryGroups(None), os.environ)


def compiled(home: Path, bundle: Path, *names: str) -> dict[str, bytes]:
    async def run() -> dict[str, bytes]:
        return {name: data async for name, data in compiler(home).compile(bundle, names, OWN_VERSION)}

    return asyncio.run(run())


def test_an_import_uses_the_byte_code_and_not_the_source(tmp_path: Path, bundle: Path) -> None:
    added = AddedBytecode(bundle)
    assert set(added.missing(OWN_VERSION)) == {"pkg/__init__.py", "pkg/mod.py"}
    files = compiled(tmp_path, bundle, *added.missing(OWN_VERSION))
    for name, data in files.items():
        added.add(name, OWN_VERSION, data)
    assert added.missing(OWN_VERSION) == {}
    (bundle / "pkg" / "mod.py").write_text("VALUE = 'compiled again'\n")  # unchecked: neither time nor content counts
    command = [sys.executable, "-I", "-B", "-c", IMPORT]
    done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=bundle)
    value, cached = done.stdout.split()
    assert value == "1"
    assert stat.S_IMODE((bundle / cached).stat().st_mode) == 0o444


def test_files_that_cannot_be_compiled_are_left_out(tmp_path: Path, bundle: Path) -> None:
    (bundle / "bad.py").write_text("def")
    (bundle / "null.py").write_bytes(b"a\0b")
    (bundle / "deep.py").write_text("(" * 5000 + ")" * 5000)
    assert set(compiled(tmp_path, bundle, "bad.py", "null.py", "absent.py", "deep.py", "pkg/mod.py")) == {"pkg/mod.py"}


HOSTILE = {
    "ends": "import os; os._exit(1)",
    "crashes": "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
    "hangs": "import time; time.sleep(600)",
    "claims too much": "import sys; sys.stdout.buffer.write(b'\\xff' * 100)",
    "writes without end": "while True: print('x' * 65536)",
    "writes half": "import sys; sys.stdout.buffer.write(b'\\0\\0\\0\\x09abc')",
}


@pytest.mark.parametrize("code", HOSTILE.values(), ids=HOSTILE)
def test_a_compiler_that_a_source_has_taken_over_leaves_no_file(
    tmp_path: Path, bundle: Path, code: str, monkeypatch: Any
) -> None:
    script = tmp_path / "hostile.py"
    script.write_text(code)
    monkeypatch.setattr(program, "__file__", os.fspath(script))
    monkeypatch.setattr(compiler_module, "_TIMEOUT_S", 0.5)
    monkeypatch.setattr(Sandboxes, "compiler", lambda *_: None)
    assert compiled(tmp_path, bundle, "pkg/mod.py") == {}


@pytest.mark.parametrize(
    ("limits", "names"),
    [((3, 9), ["a.py", "b.py", "c.py"]), ((3, 8), ["a.py", "b.py"]), ((2, 9), [])],
)
def test_byte_code_is_read_up_to_a_limit_per_file_and_per_bundle(
    tmp_path: Path, bundle: Path, monkeypatch: Any, limits: tuple[int, int], names: list[str]
) -> None:
    script = tmp_path / "three_bytes.py"
    script.write_text("import sys; sys.stdout.buffer.write(b'\\0\\0\\0\\3abc' * 3)")
    monkeypatch.setattr(program, "__file__", os.fspath(script))
    monkeypatch.setattr(Sandboxes, "compiler", lambda *_: None)
    monkeypatch.setattr(compiler_module, "_LARGEST_FILE_BYTES", limits[0])
    monkeypatch.setattr(compiler_module, "_MAX_BYTES", limits[1])
    assert list(compiled(tmp_path, bundle, "a.py", "b.py", "c.py")) == names


WAITS = """
import os, sys, time
path = sys.stdin.buffer.read().split(b"\\0")[0]
for _ in range(2):
    sys.stdout.buffer.write(b"\\0\\0\\0\\3abc")
    sys.stdout.buffer.flush()
    while not os.path.exists(os.path.dirname(path) + b"/go"):
        time.sleep(0.01)
"""


def test_the_end_of_a_compilation_leaves_that_of_another_agent_with_the_same_bundle_alone(
    tmp_path: Path, memory_groups: MemoryGroups, monkeypatch: Any
) -> None:
    script = tmp_path / "waits.py"
    script.write_text(WAITS)
    monkeypatch.setattr(program, "__file__", os.fspath(script))
    monkeypatch.setattr(Sandboxes, "compiler", lambda *_: None)
    bundles = [Home(tmp_path / home).bundles / "digest" for home in "ab"]
    for each in bundles:
        each.mkdir(parents=True)

    async def run() -> None:
        waiting, other = (
            compiler(tmp_path / home, memory_groups).compile(each, ["x.py", "y.py"], OWN_VERSION)
            for home, each in zip("ab", bundles, strict=True)
        )
        first = await anext(waiting)
        (bundles[1] / "go").touch()
        assert [name async for name, _ in other] == ["x.py", "y.py"]
        (bundles[0] / "go").touch()
        assert [first[0]] + [name async for name, _ in waiting] == ["x.py", "y.py"]

    asyncio.run(run())


def test_a_bundle_has_no_file_that_is_not_complete(bundle: Path, monkeypatch: Any) -> None:
    before = sorted(bundle.rglob("*.*"))
    seen: list[list[Path]] = []
    monkeypatch.setattr(os, "fsync", lambda _: seen.append(sorted(bundle.rglob("*.*"))))
    AddedBytecode(bundle).add("pkg/mod.py", OWN_VERSION, b"code")
    assert seen == [before]
    assert sorted(bundle.rglob("*.*")) != before


# Reports what it can do, in place of byte code.
REPORT = """
import os, socket, sys

def can(action, *arguments):
    try:
        action(*arguments)
    except OSError:
        return 0
    return 1

for path in sys.stdin.buffer.read().split(b"\\0"):
    can_connect = can(socket.create_connection, ("127.0.0.1", PORT), 5)
    data = bytes((can(open, path), can(open, path, "ab"), can(os.mkdir, path + b".d"), can_connect, os.nice(0)))
    sys.stdout.buffer.write(b"\\0\\0\\0\\5" + data)
"""


def test_a_compiler_that_a_source_has_taken_over_reads_the_bundle_and_no_more(
    tmp_path: Path, bundle: Path, monkeypatch: Any
) -> None:
    if reason := probe().namespaces:
        missing(reason)
    (tmp_path / "secret").touch()
    other = bundle.parent / "other" / "app.py"
    other.parent.mkdir()
    other.touch()
    with socket.create_server(("127.0.0.1", 0)) as server:
        script = bundle / "report.py"
        script.write_text(REPORT.replace("PORT", str(server.getsockname()[1])))
        monkeypatch.setattr(program, "__file__", os.fspath(script))
        before = sorted(tmp_path.rglob("*"))
        can = compiled(tmp_path, bundle, "pkg/mod.py", "new.py", "../other/app.py", "../../../secret")
    assert can.pop("../../../secret")[0] == 0  # it has a /tmp of its own, so it may write
    refused = bytes((0, 0, 0, 0, 19))
    assert can == {"pkg/mod.py": bytes((1, 0, 0, 0, 19)), "new.py": refused, "../other/app.py": refused}
    assert sorted(tmp_path.rglob("*")) == before
    assert (tmp_path / "secret").read_bytes() == b""


def run_background(compile_files: Any, *bundles: AddedBytecode, until_done: Callable[[], bool]) -> None:
    async def run() -> None:
        background = BackgroundCompiler(compile_files)
        for added in bundles:
            background.request(added, OWN_VERSION)
            background.request(added, OWN_VERSION)
        task = asyncio.create_task(background.run())
        try:
            await until_async(until_done)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        assert not background.has_child_processes

    asyncio.run(run())


def test_a_small_bundle_is_not_compiled_and_a_failure_does_not_end_the_others(tmp_path: Path, bundle: Path) -> None:
    small, gone, bad, last = (AddedBytecode(tmp_path / name) for name in ("small", "gone", "bad", "last"))
    for added in (small, gone, bad, last):
        added.bundle.mkdir()
        (added.bundle / "app.py").write_text("VALUE = 1\n" if added is small else LARGE)
    calls: list[str] = []

    async def compile_files(
        folder: Path, sources: Iterable[str], version: str
    ) -> AsyncGenerator[tuple[str, bytes], None]:
        calls.append(folder.name)
        if folder.name == "gone":
            shutil.rmtree(folder)
        for name in sources:
            if folder.name != "bad":
                yield name, b"code"

    cached = last.bundle / "__pycache__" / f"app.{sys.implementation.cache_tag}.pyc"
    run_background(compile_files, small, gone, bad, last, until_done=cached.exists)
    assert calls == ["gone", "bad", "last"]  # each once, though each is requested twice
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == ["bad", "cache", "last", "small"]
    assert cached.read_bytes() == b"code"


def test_byte_code_of_unknown_origin_is_detected_and_removed(bundle: Path) -> None:
    added = AddedBytecode(bundle)
    added.add("pkg/mod.py", OWN_VERSION, b"code")
    added.add("pkg/__init__.py", OWN_VERSION, b"code")
    assert added.is_intact(())
    assert not AddedBytecode(bundle).is_intact(())  # of an earlier agent
    archived = [f"pkg/__pycache__/{name}.{sys.implementation.cache_tag}.pyc" for name in ("mod", "__init__")]
    assert AddedBytecode(bundle).is_intact(archived)
    (bundle / archived[0]).unlink()
    assert added.is_intact(())
    (bundle / archived[1]).chmod(0o644)
    (bundle / archived[1]).write_bytes(b"other")
    assert not added.is_intact(())
    added.remove(archived[1:])
    assert list(bundle.rglob("*.pyc")) == [bundle / archived[1]]
    added.remove(())
    assert list(bundle.rglob("*.pyc")) == []
