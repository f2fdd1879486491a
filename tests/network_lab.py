"""A node with an internet, in network namespaces of this machine: two of them, joined by a veth pair.

`outside` has all addresses that the node reaches, and a server at each: public ones, private ones, a cloud's metadata.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import socket
import struct
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

from gpufn_platform.sandbox import system_calls
from tests.conftest import missing

PORT = 8080
PUBLIC, PRIVATE, ALLOWED, METADATA, RESOLVER = "93.184.216.34", "10.20.0.5", "10.1.0.5", "169.254.169.254", "10.9.9.53"
OTHER_REFUSED = ("172.16.3.4", "192.168.200.1", "100.64.0.9", "168.63.129.16", "100.100.100.200")
GATEWAY, NODE = "192.168.7.1", "192.168.7.2"
NAME = "somewhere.example"  # every name has the address PUBLIC
_OWN = "/proc/self/ns/net"
_T = TypeVar("_T")


def within(namespace: str, work: Callable[[], _T]) -> _T:
    """Run `work` in a thread that has entered the namespace. Its sockets stay there."""
    outcome: list[Any] = []

    def run() -> None:
        try:
            system_calls.enter_network_namespace(namespace)
            outcome.append((work(), None))
        except BaseException as error:
            outcome.append((None, error))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    value, error = outcome[0]
    if error is not None:
        raise error
    return value  # type: ignore[no-any-return]


def connects(address: str, port: int = PORT, within_s: float = 3.0) -> str:
    """Return "" if a connection succeeds, else the error's name."""
    try:
        socket.create_connection((address, port), within_s).close()
    except OSError as error:
        return type(error).__name__ + (f" {error.errno}" if type(error) is OSError else "")
    return ""


class Lab:
    def __init__(self) -> None:
        name = secrets.token_hex(4)
        self._names = {side: f"gpt-{name}-{side}" for side in ("node", "outside")}
        self.node, self.outside = (f"/run/netns/{name}" for name in self._names.values())

    def ip(self, side: str, *commands: str) -> None:
        text = "\n".join(commands)
        subprocess.run(["ip", "-netns", self._names[side], "-batch", "-"], input=text, text=True, check=True)

    def build(self, stack: contextlib.ExitStack) -> None:
        for name in self._names.values():
            subprocess.run(["ip", "netns", "add", name], check=True)
            stack.callback(subprocess.run, ["ip", "netns", "delete", name], check=False)
        others = (PUBLIC, PRIVATE, ALLOWED, METADATA, RESOLVER, *OTHER_REFUSED)
        self.ip(
            "outside",
            f"link add out type veth peer name uplink netns {self._names['node']}",
            f"address add {GATEWAY}/24 dev out",
            *(f"address add {address}/32 dev lo" for address in others),
            *("link set lo up", "link set out up"),
        )
        self.ip(
            "node",
            *(f"address add {NODE}/24 dev uplink", "link set lo up", "link set uplink up"),
            f"route add default via {GATEWAY}",
        )
        for namespace in (self.node, self.outside):  # so that `outside` reports at once that it has no route
            within(namespace, lambda: Path("/proc/sys/net/ipv4/ip_forward").write_text("1"))
        stack.enter_context(self.server(self.outside))
        stack.enter_context(self.resolver(self.outside, RESOLVER))

    @contextlib.contextmanager
    def server(self, namespace: str, address: str = "") -> Iterator[None]:
        """Accept connections in a namespace."""
        with within(namespace, lambda: socket.create_server((address, PORT), backlog=64)):
            yield

    @contextlib.contextmanager
    def resolver(self, namespace: str, address: str) -> Iterator[None]:
        """Answer DNS at an address of a namespace."""
        dns = within(namespace, lambda: _bound((address, 53)))
        thread = threading.Thread(target=_answer, args=(dns,))
        thread.start()
        try:
            yield
        finally:
            within(namespace, lambda: _send(address, b""))
            thread.join()
            dns.close()


@contextlib.contextmanager
def network_lab() -> Iterator[Lab]:
    if os.geteuid() != 0:
        pytest.skip("network namespaces need root")
    if not all(map(shutil.which, ("ip", "nft"))):
        missing("the programs ip and nft")
    with contextlib.ExitStack() as stack:
        lab = Lab()
        lab.build(stack)
        yield lab


@contextlib.contextmanager
def living_in(namespace: str) -> Iterator[None]:
    """Move this thread, and the processes that it starts, into the namespace for a while."""
    back = os.open(_OWN, os.O_RDONLY | os.O_CLOEXEC)
    try:
        system_calls.enter_network_namespace(namespace)
        try:
            yield
        finally:
            system_calls.enter_network_namespace(f"/proc/self/fd/{back}")
    finally:
        os.close(back)


def _bound(address: tuple[str, int]) -> socket.socket:
    server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    server.bind(address)
    return server


def _send(address: str, data: bytes) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client:
        client.sendto(data, (address, 53))


def _answer(dns: socket.socket) -> None:
    """Answer questions for an IPv4 address, until an empty packet."""
    while True:
        question, client = dns.recvfrom(512)
        if not question:
            return
        end = question.index(b"\0", 12) + 5
        is_ipv4 = question[end - 4 : end - 2] == b"\0\1"
        answer = struct.pack("!HHHIH4s", 0xC00C, 1, 1, 60, 4, socket.inet_aton(PUBLIC)) if is_ipv4 else b""
        head = question[:2] + struct.pack("!HHHHH", 0x8180, 1, int(is_ipv4), 0, 0)
        dns.sendto(head + question[12:end] + answer, client)
