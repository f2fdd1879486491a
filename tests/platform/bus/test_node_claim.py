"""A node name belongs to one agent, one runner and one builder."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from gpufn_core.home import Home
from gpufn_platform.bus.connection import Bus
from gpufn_platform.bus.node_claim import claim_node
from gpufn_platform.process.settings import EXIT_CONFIGURATION

MODULES = {"runner": "gpufn_runtime.runner", "builder": "gpufn_builder"}


@pytest.mark.parametrize("role", MODULES)
async def test_a_second_process_of_a_node_is_refused_with_where_the_first_is(
    nats: Any, tmp_path: Path, role: str
) -> None:
    first = await Bus.connect(nats.url_for(role), name="first")
    await claim_node(first, role, f"twice-{role}", Home(tmp_path / "first"))
    await first.flush()
    second = await asyncio.create_subprocess_exec(
        sys.executable, "-m", MODULES[role],
        env={
            **os.environ,
            "GPUFN_NATS_URL": nats.url_for(role),
            "GPUFN_NODE": f"twice-{role}",
            "GPUFN_HOME": str(tmp_path / "second"),
        },
        stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    _, said = await second.communicate()
    last_line = said.decode().splitlines()[-1]
    facts = (role, f"node twice-{role}", f"GPUFN_HOME={tmp_path / 'first'}", f"process {os.getpid()}", "GPUFN_NODE")
    assert all(fact in last_line for fact in facts)
    assert second.returncode == EXIT_CONFIGURATION
    await first.close()
