"""How far a node's devices may be promised. An operator can change some of these limits with gateway settings."""

from __future__ import annotations

import msgspec


class Limits(msgspec.Struct, frozen=True):
    """CPU time is compressible and memory is not: cores may be promised `cpu_oversubscription` times over.

    `mps_clients_per_gpu` is the number of clients that MPS supports on every driver (60 from CUDA 13.1 on).
    """

    cpu_oversubscription: float = 8.0
    time_shares_per_gpu: int = 8
    mps_clients_per_gpu: int = 48
    starts_per_node: int = 16
    share_across_domains: bool = False
