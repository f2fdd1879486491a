"""Environments on disk: complete or absent, verified, and removed by use. A script takes the place of uv."""

from __future__ import annotations

import asyncio
import hashlib
import os
import platform
import sys
from pathlib import Path

import pytest

from gpufn_core.errors import ArtifactUnavailable, BuildFailed
from gpufn_core.spec.image_spec import FILES_FOLDER, ImageSpec
from gpufn_platform.sandbox.support import probe
from gpufn_runtime.agent.environments.build import Confinement, Limits
from gpufn_runtime.agent.environments.cache import EnvironmentCache
from gpufn_runtime.agent.environments.environment import Environment
from gpufn_runtime.agent.environments.interpreters import InstalledVersions, find_interpreter
from gpufn_runtime.agent.workers.cgroups import MemoryGroups
from tests.conftest import is_locked, missing

PYTHON = "{}.{}".format(*sys.version_info)
OTHER_MACHINE = {"x86_64": "aarch64"}.get(platform.machine(), "x86_64")
LOCK = hashlib.sha256(b"").hexdigest()
# Makes the environment, whose folder is the last argument; then installs a package with its RECORD.
UV = """#!/bin/sh
if [ "$1" = venv ]; then
  for last; do :; done
  mkdir -p "$last/bin" "$last/lib/python3/site-packages/a-1.dist-info"
  ln -s "$6" "$last/bin/python"
  exit 0
fi
printf 'VALUE = 1\\n' > lib/python3/site-packages/a.py
mkdir -p lib/python3/site-packages/a_more/tests
touch lib/python3/site-packages/a_more/b.py lib/python3/site-packages/a_more/tests/test_b.py
echo 'a.py,sha256=4T34xEr13qHkEkA5ELmcxaSPLMv2imazN01quc75_GU,10' > lib/python3/site-packages/a-1.dist-info/RECORD
echo "installed without GPUFN_NATS_URL=$GPUFN_NATS_URL"
"""
NO_SOLUTION = '#!/bin/sh\n[ "$1" = venv ] || { echo noise; echo "error: No solution found"; echo "cause: a"; exit 1; }'


def image(version: int = 0, python: str = PYTHON, machine: str = "") -> ImageSpec:
    return ImageSpec(python=python, pip=(f"a=={version}",), locked=LOCK, machine=machine or platform.machine())


LIMITS = Limits(1 << 30, 1 << 30, MemoryGroups(None))


class Node:
    """A cache in a folder; `lines` are the lines of its builds."""

    def __init__(
        self,
        folder: Path,
        uv: str = UV,
        limit_bytes: int = 1 << 50,
        *,
        confinement: Confinement | None = None,
        limits: Limits = LIMITS,
    ) -> None:
        self.bundle, self.root = folder / "bundle", folder / "python" / "environments"
        lock = self.bundle / FILES_FOLDER / LOCK
        lock.parent.mkdir(parents=True, exist_ok=True)
        lock.touch()
        program = folder / "uv"
        program.write_text(uv)
        program.chmod(0o755)
        self.lines: list[str] = []
        self.cache = EnvironmentCache(
            folder / "python",
            packages=folder / "packages",
            find_uv=lambda: os.fspath(program),
            environ={"GPUFN_NATS_URL": "a secret"},
            confinement=confinement,
            limit_bytes=limit_bytes,
            build_limits=limits,
        )
        self.cache.in_use = set

    async def get(self, spec: ImageSpec) -> Environment:
        return await self.cache.get(spec, os.fspath(self.bundle), self.lines.append)

    @property
    def names(self) -> set[str]:
        return {path.name for path in self.root.iterdir()} if self.root.exists() else set()


def test_concurrent_callers_share_one_environment_that_the_next_agent_finds(tmp_path: Path) -> None:
    async def both() -> None:
        node = Node(tmp_path)
        both = asyncio.gather(node.get(image()), node.get(image()))
        await asyncio.sleep(0)
        assert list(node.cache.making) == [image().digest]
        first, second = await both
        assert list(node.cache.making) == []
        assert first == second == Node(tmp_path).cache.find(image())
        assert node.lines == ["packages: installed without GPUFN_NATS_URL=", "packages: compile bytecode"]
        assert node.names == {image().digest}
        assert first.python.startswith(os.fspath(node.root))

    asyncio.run(both())


def test_the_tests_of_packages_are_not_compiled(tmp_path: Path) -> None:
    folder = tmp_path / "tests" / "node"
    folder.mkdir(parents=True)
    made = Path(asyncio.run(Node(folder).get(image())).path)
    names = {path.name.partition(".")[0] for path in made.glob("lib/**/*.pyc")}
    assert names == {"a", "b"}


@pytest.mark.parametrize(
    ("spec", "uv", "error", "words"),
    [
        (image(), NO_SOLUTION, BuildFailed, "error: No solution found\ncause: a"),
        (image(machine=OTHER_MACHINE), UV, ArtifactUnavailable, f"locked for {OTHER_MACHINE}"),
        (image(python="3.99"), UV, ArtifactUnavailable, "no Python 3.99"),
        (image(), UV.replace("4T34", "0000"), ArtifactUnavailable, "a.py is missing or changed"),
    ],
)
def test_a_failure_has_its_reason_and_leaves_nothing(
    spec: ImageSpec, uv: str, error: type[Exception], words: str, tmp_path: Path
) -> None:
    node = Node(tmp_path, uv)
    with pytest.raises(error, match=words):
        asyncio.run(node.get(spec))
    assert node.names == set()


def test_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("gpufn_runtime.agent.environments.disk.touch", full)
    node = Node(tmp_path)
    with pytest.raises(ArtifactUnavailable, match="the disk is full"):
        asyncio.run(node.get(image()))
    assert node.names == set()


def test_files_of_a_killed_agent_are_not_an_environment_and_are_swept(tmp_path: Path) -> None:
    node = Node(tmp_path)
    (node.root / f".{image().digest}.99" / "bin").mkdir(parents=True)
    assert node.cache.find(image()) is None
    node.cache.sweep()
    assert node.names == set()


def test_a_changed_environment_is_made_again_when_it_is_doubted(tmp_path: Path) -> None:
    node = Node(tmp_path)
    module = Path(asyncio.run(node.get(image())).path, "lib/python3/site-packages/a.py")
    module.write_text("VALUE = 2\n")
    node.cache.recheck(image().digest)
    asyncio.run(node.get(image()))
    assert module.read_text() == "VALUE = 1\n"


def test_the_environment_used_the_longest_time_ago_makes_room(tmp_path: Path) -> None:
    async def fill() -> None:
        node = Node(tmp_path)
        for version in (1, 2, 3):
            await node.get(image(version))
            os.utime(node.root.parent / "facts" / f"{image(version).digest}.json", (version, version))
        node.cache = Node(tmp_path, limit_bytes=1).cache
        node.cache.in_use = lambda: {image(1).digest}
        with pytest.raises(ArtifactUnavailable, match="GPUFN_ENVIRONMENTS_DISK"):
            await node.get(image(4))
        assert node.names == {image(1).digest}

    asyncio.run(fill())


ESCAPE = """#!/bin/sh
[ "$1" = venv ] && { for last; do :; done; mkdir -p "$last"; exit 0; }
setsid setsid sh -c 'exec 9> "$0/escaped"; flock 9; trap "" TERM; echo 1 >&9; echo out
while :; do sleep 60; done' "$PWD/.." &
while ! [ -s ../escaped ]; do sleep 0.01; done
echo error: refused
exit 1
"""


@pytest.mark.parametrize("confinement", [None, Confinement((), namespaces=False), Confinement((), namespaces=True)])
def test_processes_of_a_step_end_with_it(tmp_path: Path, confinement: Confinement | None) -> None:
    if confinement is not None and confinement.namespaces and (refused := probe().namespaces):
        missing(f"user namespaces: {refused}")
    node = Node(tmp_path, ESCAPE, confinement=confinement)
    with pytest.raises(BuildFailed, match="error: refused"):
        asyncio.run(node.get(image()))
    assert not is_locked(node.root / "escaped")


@pytest.mark.parametrize(
    ("step", "words"),
    [
        ("head -c 3000000 /dev/zero > large", "GPUFN_IMAGE_BUILD_DISK"),
        ("for n in 1 2 3; do head -c 900000 /dev/zero > $n; done", "GPUFN_IMAGE_BUILD_DISK"),
        (f"exec {sys.executable} -c 'bytearray(200 << 20)'", "GPUFN_IMAGE_BUILD_MEMORY|MemoryError"),
    ],
)
def test_a_step_that_exceeds_a_limit_is_named(tmp_path: Path, step: str, words: str) -> None:
    uv = UV.replace("printf", f"{step} || exit 1; printf", 1)
    node = Node(tmp_path, uv, limits=Limits(100 << 20, 1 << 20, MemoryGroups.find()))
    with pytest.raises(BuildFailed, match=words):
        asyncio.run(node.get(image()))
    assert node.names == set()


def test_an_interpreter_that_does_not_run_is_skipped(tmp_path: Path) -> None:
    for folder, code in (("stub", "exit 127"), ("good", """echo '[3, 98, "/good/python", "/good"]'""")):
        (tmp_path / folder).mkdir()
        (program := tmp_path / folder / "python3.98").write_text(f"#!/bin/sh\n{code}\n")
        program.chmod(0o755)
    assert find_interpreter("3.98", f"{tmp_path}/stub:{tmp_path}/good").prefix == "/good"


def test_each_program_is_run_once_to_find_the_versions_of_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UV_PYTHON_INSTALL_DIR", os.fspath(tmp_path))
    for minor, code in ((28, "exit 127"), (29, """echo x >> "$0.runs"; echo '[3, 29, "/python", "/"]'""")):
        (program := tmp_path / f"python3.{minor}").write_text(f"#!/bin/sh\n{code}\n")
        program.chmod(0o755)
    installed, own = InstalledVersions(os.fspath(tmp_path)), "{}.{}".format(*sys.version_info)
    assert (installed.find(), installed.find()) == ((own, "3.29"), (own, "3.29"))
    assert (tmp_path / "python3.29.runs").read_text() == "x\n"


@pytest.mark.parametrize("name", ["gpufn.json", ".used"])
def test_the_agent_writes_through_no_link_of_a_build(name: str, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("as before")
    os.utime(victim, (1, 1))
    node = Node(tmp_path, UV + f"ln -s {victim} {name}\n")
    asyncio.run(node.get(image()))
    assert (victim.read_text(), victim.stat().st_mtime) == ("as before", 1)


def test_a_lock_that_differs_from_its_digest_is_refused(tmp_path: Path) -> None:
    node = Node(tmp_path)
    (node.bundle / FILES_FOLDER / LOCK).write_text("b==1")
    with pytest.raises(ArtifactUnavailable, match="differs from its digest"):
        asyncio.run(node.get(image()))
    assert node.names == set()


def test_a_build_that_keeps_its_output_open_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpufn_runtime.agent.environments.build._STEP_TIMEOUT_S", 0.1)
    with pytest.raises(BuildFailed, match="longer than"):
        asyncio.run(Node(tmp_path, "#!/bin/sh\nsleep 60 &\n").get(image()))
