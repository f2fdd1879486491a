"""The environment variables of `torch.distributed`, as `torchrun --nproc-per-node 1` sets them.

gloo listens on the address that the host name resolves to, which is often 127.0.0.1. So GLOO_SOCKET_IFNAME names the
network interface of the route to rank 0, unless the function's `env` sets another interface.
"""

from __future__ import annotations

import contextlib
import fcntl
import socket
import struct

from gpufn_core.domain.worker import Gang

_SIOCGIFADDR = 0x8915


def environment(gang: Gang, worker: str) -> dict[str, str]:
    """
    >>> from gpufn_core.domain.worker import Rank
    >>> gang = Gang((Rank("w-1", "a"), Rank("w-2", "b")), "10.0.0.1", 29400, "secret")
    >>> variables = environment(gang, "w-2")
    >>> variables["MASTER_ADDR"], variables["MASTER_PORT"], variables["RANK"], variables["WORLD_SIZE"]
    ('10.0.0.1', '29401', '1', '2')
    """
    rank, size = str(gang.rank_of(worker)), str(len(gang.ranks))
    interface = interface_towards(gang)
    return {
        **({"GLOO_SOCKET_IFNAME": interface} if interface else {}),
        "MASTER_ADDR": gang.address,
        "MASTER_PORT": str(gang.master_port),
        "RANK": rank,
        "WORLD_SIZE": size,
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "GROUP_RANK": rank,
        "NODE_RANK": rank,
        "NNODES": size,
    }


def interface_towards(gang: Gang) -> str:
    """Return the network interface with this node's address on the route to rank 0; "" if it is unknown.

    >>> interface_towards(Gang((), "127.0.0.1", 29400, "secret"))
    'lo'
    """
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((gang.address, gang.port))  # a datagram socket sends nothing here
        own = socket.inet_aton(probe.getsockname()[0])
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # it has no IPv4 address
                request = struct.pack("256s", name.encode())
                if fcntl.ioctl(probe, _SIOCGIFADDR, request)[20:24] == own:
                    return name
    return ""
