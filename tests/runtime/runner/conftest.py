"""A nats-server for each of the runner's tests: they kill it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from gpufn.bus.embedded import EmbeddedServer


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    with EmbeddedServer.start(tmp_path / "nats") as server:
        yield server.url
