"""Connection between a container's process and its agent: the process sends one line."""

from __future__ import annotations

import asyncio
import tracemalloc
from pathlib import Path

import msgspec

from gpufn_core.protocol.launch import TemplateReady
from gpufn_runtime.agent.launchers.fork_channel import Control

MIB = 1 << 20


def test_output_of_a_container_after_it_is_ready_is_not_stored(tmp_path: Path) -> None:
    """A module in an image could fill the agent's memory."""

    async def run() -> TemplateReady:
        control = Control(tmp_path / "a")
        control.data_received(msgspec.json.encode(TemplateReady(("numpy",))) + b"\n")
        for _ in range(32):
            control.data_received(bytes(MIB))
        return await control.ready()

    tracemalloc.start()
    try:
        assert asyncio.run(run()).modules == ("numpy",)
        assert tracemalloc.get_traced_memory()[1] < 8 * MIB
    finally:
        tracemalloc.stop()
