"""A gateway behind Caddy, with the Caddyfile of the documentation."""

from __future__ import annotations

import os
import re
import shutil
import socket
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.conftest import ROOT, Platform, missing
from tests.waiting import until

pytestmark = pytest.mark.e2e

APP = Path(__file__).parent / "apps" / "proxied.py"
BODY = bytes(range(256)) * (40 << 12)


def _caddyfile(port: int, gateway: str) -> str:
    """Return the documentation's Caddyfile with addresses and an authority of this machine."""
    documented = re.search(r"```caddyfile\n(.*?)```", (ROOT / "docs" / "tls.md").read_text(), re.DOTALL)
    assert documented is not None
    site = documented[1].replace("gpu.example.org {", f"https://127.0.0.1:{port} {{\n\ttls internal")
    assert "127.0.0.1:8090" in site
    return f"{{\n\tadmin off\n\tauto_https disable_redirects\n\tskip_install_trust\n}}\n{site}".replace(
        "127.0.0.1:8090", gateway.removeprefix("http://")
    )


@pytest.fixture(scope="module")
def client(platform: Platform, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A client of the platform that speaks to Caddy."""
    if (caddy := shutil.which("caddy")) is None:
        missing("caddy is not installed")
    platform.gpufn("deploy", APP)
    folder = tmp_path_factory.mktemp("caddy")
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    (folder / "Caddyfile").write_text(_caddyfile(port, platform.url))
    environ = os.environ | {"XDG_DATA_HOME": str(folder), "XDG_CONFIG_HOME": str(folder), "HOME": str(folder)}
    with (folder / "log").open("wb") as log:
        proxy = subprocess.Popen([caddy, "run"], cwd=folder, env=environ, stdout=log, stderr=log)
    try:
        root = folder / "caddy" / "pki" / "authorities" / "local" / "root.crt"
        until(lambda: (root.exists() and root.stat().st_size) or proxy.poll() is not None, (folder / "log").read_text)
        trust = ssl.create_default_context(cafile=os.fspath(root))
        with httpx.Client(base_url=f"https://127.0.0.1:{port}", verify=trust, timeout=60) as client:
            until(lambda: _is_ready(client), (folder / "log").read_text)
            yield client
    finally:
        proxy.terminate()
        proxy.wait()


def _is_ready(client: httpx.Client) -> bool:
    try:
        return client.get("/readyz").status_code == 200
    except httpx.TransportError:
        return False


def test_a_large_body_passes_both_ways(client: httpx.Client) -> None:
    answer = client.post(
        "/v1/functions/backwards/invoke", content=BODY, headers={"content-type": "application/octet-stream"}
    )
    assert (answer.status_code, answer.http_version, answer.content == BODY[::-1]) == (200, "HTTP/1.1", True)


def test_a_refused_upload_reaches_the_client(client: httpx.Client) -> None:
    answer = client.post("/v1/functions/nosuch/invoke", content=BODY[: 8 << 20])
    assert answer.status_code == 404
