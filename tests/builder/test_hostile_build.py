"""Attacks by a build process that a hostile model has taken over. docs/trust.md lists these attacks."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpufn_builder.identity import cpu_target
from gpufn_builder.processes.sandboxes import BuildSandboxes
from gpufn_core.home import Home
from gpufn_platform.process.settings import EXIT_CONFIGURATION
from gpufn_platform.sandbox.host_paths import own_python_folders, system_secrets
from gpufn_platform.sandbox.support import Support, probe
from tests.builder import bench, hostile, models
from tests.conftest import ROOT, is_locked, missing
from tests.e2e.test_sandbox import DENIED, REFUSE_NAMESPACES

# A read-only file system, an empty file instead of a hidden one, and a name that another network's socket has.
# The builder has no number in the PID namespace of a build.
REFUSED = (*DENIED, "OSError 30", "", "ConnectionRefusedError", "ProcessLookupError")
SUPPORT = probe()


def sandboxes(home: Home, *, namespaces: bool) -> BuildSandboxes:
    unsupported = SUPPORT.missing() if namespaces else Support(files=SUPPORT.files, signals=SUPPORT.signals).missing()
    if unsupported:
        missing(f"a kernel that allows these parts of the sandbox: {unsupported}")
    python = own_python_folders([os.fspath(ROOT)], os.environ)
    return BuildSandboxes(home, python, private=system_secrets(), namespaces=namespaces)


@pytest.mark.parametrize("namespaces", [True, False])
async def test_a_hostile_build_reaches_nothing_of_the_platform(
    connect: Any, nats: Any, tmp_path: Path, namespaces: bool
) -> None:
    attacks, beyond, outcomes, escaped = await attacked(
        connect, nats, tmp_path, lambda home: sandboxes(home, namespaces=namespaces)
    )
    assert not is_locked(escaped), "a process that it started has not ended with it"
    assert {name: outcomes[name] for name in attacks if outcomes[name] not in REFUSED} == {}
    reached = {name for name in beyond if outcomes[name] is True}
    assert reached == (set() if namespaces else set(beyond))


async def test_without_a_sandbox_a_hostile_build_reaches_the_platform(connect: Any, nats: Any, tmp_path: Path) -> None:
    """These are limits of GPUFN_ISOLATION=off. docs/trust.md says so."""
    attacks, beyond, outcomes, escaped = await attacked(connect, nats, tmp_path, lambda home: None)
    assert is_locked(escaped), "it has outlived its build"
    os.kill(int(escaped.read_text()), signal.SIGKILL)
    as_root = {"read shadow", "write to the machine"} if os.geteuid() else set()
    expected = {*attacks, *beyond} - as_root - {"new namespace"}  # a process with several threads may not
    assert {name for name in expected if outcomes[name] in REFUSED} == set()


async def attacked(
    connect: Any, nats: Any, tmp_path: Path, made: Callable[[Home], BuildSandboxes | None]
) -> tuple[dict[str, str], dict[str, str], dict[str, Any], Path]:
    """Return the attacks, those that only namespaces prevent, the outcomes, and the file that a process locked that
    should have ended."""
    home = Home(tmp_path / "home")
    home.ensure()
    secrets = [home.nats / "credentials.json", home.builds / "other" / "model.onnx", home.bundles / "b" / "app.py"]
    for path in secrets:
        path.parent.mkdir(parents=True)
        path.write_text("secret")
    caches = home.root / "tuning"
    caches.mkdir()
    me, bus_port = os.getpid(), nats.port
    attacks = {
        **{f"read {path.name}": f"Path('{path}').read_text()" for path in (*secrets, Path("/etc/shadow"))},
        "list another build's files": f"os.listdir('{home.builds / 'other'}')",
        "signal the builder": f"os.kill({me}, 0)",
        "limit the builder": f"resource.prlimit({me}, resource.RLIMIT_CPU)",
        "trace the builder": f"ptrace({me})",
        "read the builder's variables": f"Path('/proc/{me}/environ').read_bytes()",
        "read the builder's memory": f"open('/proc/{me}/mem')",
        "abstract socket": f"connect(socket.AF_UNIX, '\\0gpufn-build-{me}')",
        "new namespace": "new_user_namespace()",
        "write to the machine": "open('/etc/hosts', 'r+').close()",
    }
    beyond_namespaces = {
        "socket": f"connect(socket.AF_UNIX, '{home.run / 's'}')",
        "bus": f"connect(socket.AF_INET, ('127.0.0.1', {bus_port}))",
    }
    if (confined := made(home)) is None:
        del attacks["trace the builder"]  # it would stop this process for ever
    (caches / hostile.ATTACKS).write_text(json.dumps(attacks | beyond_namespaces))
    executor, _ = await bench.open_executor(
        await connect(nats),
        home.root,
        process="tests.builder.hostile",
        sandboxes=confined,
    )
    with socket.socket(socket.AF_UNIX) as named, socket.socket(socket.AF_UNIX) as abstract:
        named.bind(os.fspath(home.run / "s"))
        abstract.bind(f"\0gpufn-build-{me}")
        named.listen()
        abstract.listen()
        spec = await bench.upload(await connect(nats), models.mlp())
        await executor.run(bench.build_of(spec), cpu_target(), lambda _: None)
    outcomes = json.loads((caches / hostile.OUTCOMES).read_bytes())
    return attacks, beyond_namespaces, outcomes, caches / hostile.ESCAPED


async def test_a_model_is_built_in_the_sandbox(connect: Any, nats: Any, tmp_path: Path) -> None:
    bus, home = await connect(nats), Home(tmp_path / "home")
    home.ensure()
    executor, _ = await bench.open_executor(bus, home.root, sandboxes=sandboxes(home, namespaces=True))
    ended = await executor.run(bench.build_of(await bench.upload(bus, models.mlp())), cpu_target(), lambda _: None)
    assert (len(ended.engines), ended.error) == (1, None)


def test_a_strict_builder_without_namespaces_does_not_start(tmp_path: Path) -> None:
    environ = {"GPUFN_HOME": str(tmp_path / "home"), "GPUFN_NATS_URL": "nats://127.0.0.1:1"}
    ended = subprocess.run(
        [*REFUSE_NAMESPACES, sys.executable, "-m", "gpufn_builder"],
        env=os.environ | environ | {"GPUFN_ISOLATION": "strict"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (ended.returncode, "GPUFN_ISOLATION=strict" in ended.stderr) == (EXIT_CONFIGURATION, True)
