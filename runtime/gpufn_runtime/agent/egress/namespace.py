"""The network namespace of this node's workers with `network="egress"`: one for all, made when the first is needed.

A veth pair leads from it to the node, which forwards and translates its packets (`rules`). A worker enters it when it
starts: it needs no process and no copies of packets. A GPUFN_HOME has one name for the namespace and for the interface.
So an agent that starts after a crash finds both, and adopted workers stay connected.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import ipaddress
import json
import logging
import os
import subprocess
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Final

from gpufn_core.home import Home
from gpufn_core.protocol.launch import NetworkNamespace
from gpufn_runtime.agent.egress import availability, resolver, rules
from gpufn_runtime.agent.egress.commands import reason, run, succeeds
from gpufn_runtime.agent.egress.rules import Network, Policy
from gpufn_runtime.agent.launchers.base import NodeFault

log = logging.getLogger(__name__)

_NAMESPACES: Final = Path("/run/netns")  # of `ip netns`
_OWN: Final = "/proc/self/ns/net"
_INNER: Final = "eth0"
_LINK_LOCAL: Final = ipaddress.IPv4Network("169.254.0.0/16")  # networks do not route it
_SMALL: Final = 30  # length of the prefix: two addresses
# Services of clouds and of Kubernetes have addresses in them.
_KEPT: Final = tuple(ipaddress.IPv4Network(f"169.254.{third}.0/24") for third in (0, 20, 25, 169, 170, 255))
_DOCKER_CHAIN: Final = "DOCKER-USER"  # Docker lets the kernel drop all other forwarded packets


class EgressNamespace:
    """`trouble` is why this node cannot have one; "" if it can. `report` receives it if a set-up fails later."""

    def __init__(
        self,
        home: Home,
        allowed: Iterable[Network] = (),
        *,
        trouble: str,
        report: Callable[[str], None] = lambda _: None,
    ) -> None:
        name = hashlib.sha256(os.fsencode(home.root)).hexdigest()
        self._name = f"gpufn-{name[:12]}"
        self._interface = f"gpfw-{name[:8]}"  # 15 characters at most
        self._seed = int(name[:8], 16)
        self._folder = home.run / "egress"
        self._allowed = tuple(allowed)
        self._trouble = trouble
        self._report = report
        self._lock = asyncio.Lock()
        self._joined: NetworkNamespace | None = None

    @property
    def has_child_processes(self) -> bool:
        """Return whether a command runs whose process only its caller may reap."""
        return self._lock.locked()

    async def start(self) -> None:
        """Apply the present rules to the network of an earlier agent, or remove it."""
        if not (_NAMESPACES / self._name).exists():
            return
        if self._trouble:
            await self.remove()
            return
        with contextlib.suppress(NodeFault):  # reported
            await self.ready()

    async def ready(self) -> NetworkNamespace:
        """Return the namespace, which is made if necessary. Raises NodeFault."""
        async with self._lock:
            if self._trouble:
                raise NodeFault(f"No worker can have network='egress' on this node: {self._trouble}.")
            if self._joined is None:
                try:
                    self._joined = await asyncio.to_thread(self._set_up)
                except (OSError, subprocess.SubprocessError, ValueError) as error:
                    self._trouble = f"the network namespace cannot be set up: {reason(error)}"
                    log.warning("%s", self._trouble)
                    self._report(self._trouble)
                    await asyncio.to_thread(self._tear_down)
                    raise NodeFault(f"No worker can have network='egress' on this node: {self._trouble}.") from error
            return self._joined

    async def remove(self) -> None:
        """Remove the namespace and the rules, if there are any."""
        async with self._lock:
            self._joined = None
            if (_NAMESPACES / self._name).exists():
                await asyncio.to_thread(self._tear_down)

    def _set_up(self) -> NetworkNamespace:
        path = _NAMESPACES / self._name
        if path.exists() and path.stat().st_dev != os.stat(_OWN).st_dev:  # a file without its mount
            path.unlink()
        if not path.exists():
            run("ip", "netns", "add", self._name)
        network = self._address()
        if network is None:
            network = self._connect()
        dns = availability.current_dns()
        policy = Policy(self._allowed, dns.servers, dns.on_loopback)
        if dns.on_loopback is not None:  # packets that came from another interface may reach it
            Path(f"/proc/sys/net/ipv4/conf/{self._interface}/route_localnet").write_text("1")
        run("nft", "--file", "-", given=rules.of_node(self._interface, policy, network))
        _in_namespace(self._name, "nft", "--file", "-", given=rules.of_namespace(self._name))
        self._run_inside(rules.routing(policy, network.ip, _peer(network).ip))
        self._pass_docker()
        self._folder.mkdir(exist_ok=True, mode=0o755)
        file = self._folder / "resolv.conf"
        file.write_text(resolver.resolv_conf(dns, network.ip))
        log.info("workers with network='egress' have the namespace %s: %s", self._name, network)
        target = os.path.realpath(resolver.RESOLV_CONF)
        return NetworkNamespace(os.fspath(path), path.stat().st_ino, target, os.fspath(file))

    def _address(self) -> ipaddress.IPv4Interface | None:
        """Return the address of the node's end of the veth pair; None if there is no pair."""
        return next((address for name, address in _addresses() if name == self._interface), None)

    def _connect(self) -> ipaddress.IPv4Interface:
        used = [address.network for _, address in _addresses()]
        subnet = next(each for each in _subnets(self._seed) if not any(each.overlaps(other) for other in used))
        outer = ipaddress.IPv4Interface((next(subnet.hosts()), _SMALL))
        inner = _peer(outer)
        with contextlib.suppress(subprocess.CalledProcessError):  # a pair that was not completed
            run("ip", "link", "delete", self._interface)
        commands = (
            f"link add {self._interface} type veth peer name {_INNER} netns {self._name}",
            f"address add {outer} dev {self._interface}",
        )
        run("ip", "-batch", "-", given="\n".join(commands))
        with contextlib.suppress(FileNotFoundError):  # the kernel has no IPv6
            Path(f"/proc/sys/net/ipv6/conf/{self._interface}/disable_ipv6").write_text("1")
        run("ip", "link", "set", self._interface, "up")
        inside = (
            *(f"address add {inner} dev {_INNER}", f"link set {_INNER} up", f"route add default via {outer.ip}"),
            "rule delete pref 0",  # the rule that precedes all others
        )
        self._run_inside(inside)
        return outer

    def _run_inside(self, commands: Iterable[str]) -> None:
        run("ip", "-netns", self._name, "-batch", "-", given="\n".join(commands))

    def _pass_docker(self) -> None:
        """Let Docker's rules pass the packets, which come after ours."""
        for rule in self._docker_rules():
            if succeeds("iptables", "--list", _DOCKER_CHAIN) and not succeeds("iptables", "--check", *rule):
                run("iptables", "--insert", *rule)

    def _docker_rules(self) -> tuple[tuple[str, ...], ...]:
        return tuple(
            (_DOCKER_CHAIN, option, self._interface, "--jump", "ACCEPT")
            for option in ("--in-interface", "--out-interface")
        )

    def _tear_down(self) -> None:
        for command in (
            ("ip", "link", "delete", self._interface),  # the remaining workers have no network then
            ("ip", "netns", "delete", self._name),
            ("nft", "delete", "table", "inet", self._interface),
        ):
            if not succeeds(*command):
                log.warning("this command failed: %s", " ".join(command))
        for rule in self._docker_rules():
            succeeds("iptables", "--delete", *rule)


def _peer(outer: ipaddress.IPv4Interface) -> ipaddress.IPv4Interface:
    """Return the address of the workers' end."""
    return ipaddress.IPv4Interface((outer.ip + 1, _SMALL))


def _subnets(seed: int) -> Iterator[ipaddress.IPv4Network]:
    """Return the candidates for the pair's network, in an order that depends on the seed."""
    size = 2 ** (32 - _SMALL)
    count = _LINK_LOCAL.num_addresses // size
    for place in range(count):
        start = int(_LINK_LOCAL.network_address) + (seed + place) % count * size
        subnet = ipaddress.IPv4Network((start, _SMALL))
        if not any(subnet.subnet_of(kept) for kept in _KEPT):
            yield subnet


def _addresses() -> list[tuple[str, ipaddress.IPv4Interface]]:
    links = json.loads(run("ip", "-json", "-4", "address"))
    return [
        (link["ifname"], ipaddress.IPv4Interface((info["local"], info["prefixlen"])))
        for link in links
        for info in link.get("addr_info", ())
    ]


def _in_namespace(name: str, *command: str, given: str) -> None:
    run("ip", "netns", "exec", name, *command, given=given)
