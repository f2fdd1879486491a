"""`gpufn up --nats URL` uses an existing bus, and does not stop it."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpufn_local.nats_process import EmbeddedServer
from tests.conftest import running_platform

pytestmark = pytest.mark.e2e

APP = Path(__file__).parent / "apps" / "steady.py"


def test_a_separate_nats_server_serves_the_platform(nats: EmbeddedServer, tmp_path: Path) -> None:
    with running_platform(tmp_path / "home", "--nats", nats.url) as platform:
        platform.gpufn("deploy", APP)
        assert platform.invoke("steady", {"number": 3}) == 3
        assert not (tmp_path / "home" / "nats").exists()
    assert nats.exit_code is None, "gpufn does not stop a server of the user"
    with running_platform(tmp_path / "other-home", "--nats", nats.url) as platform:
        assert platform.invoke("steady", {"number": 4}) == 4, "the bus keeps deployed functions"
