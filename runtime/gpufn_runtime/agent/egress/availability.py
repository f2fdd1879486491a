"""Reasons why this node cannot offer `network="egress"` to worker processes, or to containers."""

from __future__ import annotations

import ipaddress
import os
import shutil
import subprocess
from pathlib import Path
from typing import Final

from gpufn_runtime.agent.egress import resolver, rules
from gpufn_runtime.agent.egress.rules import Policy

_CAP_NET_ADMIN, _CAP_SYS_ADMIN = 12, 21
_PROGRAMS: Final = {"nft": "nftables", "ip": "iproute2"}
_FORWARDING = Path("/proc/sys/net/ipv4/ip_forward")
_WITHIN_S: Final = 10
_SOME_ADDRESS: Final = ipaddress.IPv4Interface("169.254.1.1/30")


def trouble(*, for_containers: bool = False) -> str:
    """Return why the packets of workers with `network="egress"` cannot be filtered here; "" if they can. Changes
    nothing. `for_containers`: Docker forwards them, and makes their resolv.conf."""
    if not _may_configure_networks():
        return "the agent does not run as root with CAP_NET_ADMIN and CAP_SYS_ADMIN"
    for program, package in _PROGRAMS.items():
        if shutil.which(program) is None:
            return f"the program {program} is not installed (package {package})"
    if for_containers:
        return _refused(rules.of_node("gpufn-check", Policy()))
    if _read(_FORWARDING).strip() != "1":
        return "the machine does not forward packets (net.ipv4.ip_forward is 0)"
    dns = current_dns()
    if not dns.servers and dns.on_loopback is None:
        return f"{resolver.RESOLV_CONF} names IPv6 resolvers only"
    policy, network = Policy(resolvers=dns.servers, on_loopback=_SOME_ADDRESS.ip), _SOME_ADDRESS
    return _refused(rules.of_node("gpufn-check", policy, network) + rules.of_namespace("gpufn-in"))


def current_dns() -> resolver.Dns:
    return resolver.read(_read(Path(resolver.RESOLV_CONF)), _read(Path(resolver.UPSTREAMS)))


def _may_configure_networks() -> bool:
    if os.geteuid() != 0:
        return False
    fields = dict(line.split(":", 1) for line in _read(Path("/proc/self/status")).splitlines() if ":" in line)
    effective = int(fields.get("CapEff", "0"), 16)
    return all(effective >> number & 1 for number in (_CAP_NET_ADMIN, _CAP_SYS_ADMIN))


def _refused(ruleset: str) -> str:
    """Return why the kernel would refuse the ruleset; "" if it would not."""
    try:
        ended = subprocess.run(
            ["nft", "--check", "--file", "-"],  # noqa: S607 - found on the PATH, as above
            input=ruleset,
            capture_output=True,
            text=True,
            timeout=_WITHIN_S,
            check=False,
        )
    except (OSError, subprocess.SubprocessError) as error:
        return f"nft does not work: {error}"
    if ended.returncode == 0:
        return ""
    return f"nft refuses the rules: {(ended.stderr.strip() or 'no reason given').splitlines()[0]}"


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
