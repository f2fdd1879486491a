"""A Docker daemon for the tests, which they may stop at any time, and a platform that runs workers in it.

The daemon needs root, Debian's docker.io, and the file that GPUFN_TEST_BASE_IMAGE names, which `.ci/base-image` makes,
or is making.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

import pytest

from gpufn_runtime.agent.launchers.containers.freezer import Freezer
from tests.conftest import Platform, running_platform
from tests.network_lab import RESOLVER, Lab, network_lab

BASE = "gpufn-test-base:latest"
APPS = Path(__file__).parent / "apps"
PROGRAMS = Path(__file__).parent / "programs"
_WITHIN_S = 60.0


def lacking(what: str) -> NoReturn:
    if os.environ.get("CI") == "true" and os.environ.get("GPUFN_TEST_BASE_IMAGE"):
        pytest.fail(what)
    pytest.skip(what)


def _is_frozen(pid: int) -> bool:
    """Return whether the process is frozen, or will be in a moment."""
    freezer = Freezer.of(pid)
    with contextlib.suppress(OSError):
        return freezer is not None and freezer.file.read_text().strip() in ("1", "FROZEN", "FREEZING")
    return False


@dataclass
class Daemon:
    """dockerd with all its files below `root`, on the node of the lab."""

    root: Path
    lab: Lab
    process: subprocess.Popen[bytes] | None = field(default=None, init=False)

    @property
    def host(self) -> str:
        return f"unix://{self.root}/docker.sock"

    def start(self) -> None:
        options = ["--host-uds=open", "--host-fifo=open"]
        stand_in = {"runsc": {"path": os.fspath(PROGRAMS / "runsc"), "runtimeArgs": options}}
        (self.root / "daemon.json").write_text(json.dumps({"runtimes": stand_in}))
        (resolvers := self.root / "resolv.conf").write_text(f"nameserver {RESOLVER}\n")
        with (self.root / "log").open("ab") as log:
            self.process = subprocess.Popen(
                [
                    *("nsenter", f"--net={self.lab.node}"),  # it would remove another daemon's objects in ours
                    # The lab's resolver: with one that does not respond, each pull takes ten seconds to fail.
                    *("unshare", "--mount", "sh", "-c", 'mount --bind "$0" /etc/resolv.conf && exec "$@"'),
                    os.fspath(resolvers),
                    "dockerd",
                    f"--config-file={self.root}/daemon.json",
                    f"--host={self.host}",
                    f"--data-root={self.root}/data",
                    f"--exec-root={self.root}/exec",
                    f"--pidfile={self.root}/pid",
                    "--shutdown-timeout=3",  # paused containers do not handle SIGTERM
                    "--ip6tables=false",
                ],
                env=os.environ | {"PATH": f"{PROGRAMS}:{os.environ['PATH']}"},
                stdout=log,
                stderr=log,
            )
        give_up = time.monotonic() + _WITHIN_S
        while subprocess.run(self._command("version"), capture_output=True, check=False).returncode != 0:
            if self.process.poll() is not None or time.monotonic() > give_up:
                self.stop()
                lacking(f"dockerd does not start here:\n{(self.root / 'log').read_text()[-2000:]}")
            time.sleep(0.05)

    def stop(self) -> None:
        if self.process is not None:
            self.process.terminate()
            self.process.wait(60)
            self.process = None

    @contextlib.contextmanager
    def hung(self) -> Iterator[None]:
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.process.send_signal(signal.SIGCONT)

    def docker(self, *arguments: str) -> list[str]:
        """Run a docker command and return its output lines."""
        ended = subprocess.run(self._command(*arguments), capture_output=True, text=True, check=False)
        assert ended.returncode == 0, ended.stderr
        return ended.stdout.split("\n")[:-1]

    def containers(self, *, status: str = "", owner: str = "") -> list[str]:
        filters = [*([f"status={status}"] if status else []), *([f"label=gpufn.owner={owner}"] if owner else [])]
        return self.docker("ps", "-aq", "--no-trunc", *(word for each in filters for word in ("--filter", each)))

    def remove(self, container: str) -> None:
        """Remove the container, unless the agent is already removing it."""
        command = self._command("rm", "-f", container)
        told = subprocess.run(command, capture_output=True, text=True, check=False).stderr
        assert not told or "already in progress" in told or "No such container" in told, told

    def pid(self, container: str) -> int:
        """Return the pid of the first process, or 0 if the container is gone."""
        command = self._command("inspect", "--format", "{{.State.Pid}}", container)
        told = subprocess.run(command, capture_output=True, text=True, check=False).stdout
        return int(told.strip() or 0)

    def frozen(self) -> list[str]:
        """Return the frozen containers. Docker does not know that they are frozen."""
        return [container for container in self.containers(status="running") if _is_frozen(self.pid(container))]

    def awake(self) -> list[str]:
        frozen = self.frozen()
        return [container for container in self.containers(status="running") if container not in frozen]

    def images(self) -> list[str]:
        """Return the tags of the images that platforms have built."""
        tags = self.docker("images", "--format", "{{.Repository}}:{{.Tag}}")
        return [tag for tag in tags if re.match(r"gpufn-[0-9a-f]{12}:", tag)]

    def _command(self, *arguments: str) -> list[str]:
        return ["docker", f"--host={self.host}", *arguments]


@contextlib.contextmanager
def running_daemon(lab: Lab) -> Iterator[Daemon]:
    base = os.environ.get("GPUFN_TEST_BASE_IMAGE", "")
    if not base:
        lacking("GPUFN_TEST_BASE_IMAGE names no base image; `.ci/base-image FILE.tar` makes one")
    with contextlib.suppress(FileNotFoundError), open(f"{base}.lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)  # while it is being created
    if not Path(base).exists():
        lacking(f"there is no {base}: `.ci/base-image` did not make it")
    for program in ("nsenter", "unshare", "dockerd", "docker"):
        if shutil.which(program) is None:
            lacking(f"there is no {program}")
    if os.geteuid() != 0:
        lacking("a daemon of our own needs root")
    root = Path(tempfile.mkdtemp(prefix="gpufn-docker-"))  # short, because a socket's path has a length limit
    daemon = Daemon(root, lab)
    try:
        daemon.start()
        daemon.docker("import", base, BASE)
        yield daemon
    finally:
        daemon.stop()
        shutil.rmtree(root, ignore_errors=True)


@pytest.fixture(scope="session")
def lab() -> Iterator[Lab]:
    """A node with an internet. The daemon is on the node."""
    with network_lab() as lab:
        yield lab


@pytest.fixture(scope="session")
def daemon(lab: Lab) -> Iterator[Daemon]:
    with running_daemon(lab) as daemon:
        yield daemon


@contextlib.contextmanager
def platform_with(daemon: Daemon, home: Path, **environ: str) -> Iterator[Platform]:
    settings = {
        "GPUFN_DOCKER_HOST": daemon.host,
        "GPUFN_LAUNCHER": "docker",
        "GPUFN_BASE_IMAGE": BASE,
        "GPUFN_BUILD_NETWORK": "none",
        "PATH": f"{PROGRAMS}:{os.environ['PATH']}",  # the agent looks for the hook, too
    }
    with running_platform(home, environ=settings | environ) as platform:
        yield platform


@pytest.fixture(scope="module")
def contained(daemon: Daemon, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Platform]:
    """A platform whose workers are in containers."""
    with platform_with(daemon, tmp_path_factory.mktemp("home")) as platform:
        platform.gpufn("deploy", APPS / "confined.py", "--no-check")
        yield platform
