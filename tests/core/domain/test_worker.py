"""Descriptions of how workers ended, and the charge of a gang."""

from __future__ import annotations

import msgspec
import pytest

from gpufn_core.domain.devices.device import DeviceShare
from gpufn_core.domain.worker import Assignment, Exit, Gang, Rank


@pytest.mark.parametrize(
    ("end", "description"),
    [
        (Exit(code=3), "exited with code 3"),
        (Exit(signal=11), "was killed by SIGSEGV"),
        (Exit(signal=200), "was killed by signal 200"),
        (Exit(code=130, signal=2), "was killed by SIGINT, or exited with code 130"),
        (Exit(code=192, signal=64), "was killed by SIGRTMAX, or exited with code 192"),
        (Exit(code=137, signal=9, killed_for="it took too long"), "was killed by SIGKILL (it took too long)"),
        (Exit(out_of_memory=True), "was killed because it used more memory than allowed (memory=... sets it)"),
        (
            Exit(signal=9, out_of_memory=True, memory_limit_bytes=96 << 20),
            "was killed because it used more than its 96 MiB of memory (memory=... sets it)",
        ),
        (Exit(signal=9, device_fault="Xid 79"), "was ended because of its GPU: Xid 79"),
        (Exit(unknown_reason="Docker does not answer"), "ended (Docker does not answer)"),
        (Exit(), "ended"),
    ],
)
def test_how_a_worker_ended_in_a_line(end: Exit, description: str) -> None:
    assert end.describe() == description


def test_each_rank_of_a_gang_is_charged() -> None:
    share = DeviceShare("cpu", 1.0, 1 << 30, ("g0", "g1"))
    alone = Assignment(worker="w-0", node="a", function="f", revision=1, share=share, epoch=1, created_at=0.0)
    gang = Gang(tuple(Rank(f"w-{rank}", f"n{rank}") for rank in range(3)), "10.0.0.1", 29400, "secret")
    assert (alone.gpus_charged, msgspec.structs.replace(alone, gang=gang).gpus_charged) == (2.0, 6.0)
