"""The environment variables of `torch.distributed`, as `torchrun --nproc-per-node 1` sets them."""

from __future__ import annotations

from gpufn_core.domain.worker import Gang


def environment(gang: Gang, worker: str) -> dict[str, str]:
    """
    >>> from gpufn_core.domain.worker import Rank
    >>> gang = Gang((Rank("w-1", "a"), Rank("w-2", "b")), "10.0.0.1", 29400, "secret")
    >>> variables = environment(gang, "w-2")
    >>> variables["MASTER_ADDR"], variables["MASTER_PORT"], variables["RANK"], variables["WORLD_SIZE"]
    ('10.0.0.1', '29401', '1', '2')
    """
    rank, size = str(gang.rank_of(worker)), str(len(gang.ranks))
    return {
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
