"""A nats-server per test, because tests kill it. Runners report often."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from gpufn_local.nats_process import EmbeddedServer
from gpufn_runtime.runner import loop


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    with EmbeddedServer.start(tmp_path / "nats") as server:
        yield server.url


@pytest.fixture(autouse=True)
def _report_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "_TICK_S", 0.05)
