"""The web console in Chromium, against a running platform. The tests are in gateway/console/tests/browser."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from gpufn_core.ids import digest_of
from tests import issuer
from tests.builder.models import mlp
from tests.conftest import ROOT, Platform, missing, running_platform

pytestmark = pytest.mark.e2e

CONSOLE = ROOT / "gateway" / "console"
BUILT = ROOT / "gateway" / "gpufn_gateway" / "console" / "assets" / "index.html"
# The log lines contain an escape sequence of terminals, and a character that turns the direction of text.
APP = """
import time
from gpufn import asgi_app, gpu_function

@gpu_function(retries=1, max_workers={max_workers})
def greet(name: str, times: int = 1) -> str:
    "Say hello."
    print(f"\\x1b[31mgreeting\\x1b[0m {{name}} \\u202etxt.exe")
    if times < 0:
        raise ValueError("times is negative: " + name)
    return " ".join([f"hello {{name}}"] * times)

@gpu_function
def slow(seconds: float) -> float:
    for step in range(int(seconds * 10)):
        print("step", step)
        time.sleep(0.1)
    return seconds

@gpu_function(schedule="0 6 1 1 *")
def nightly() -> int:
    return 1

@gpu_function(memory="900TiB")
def huge() -> int:
    return 1

@asgi_app(public=True)
def site():
    async def app(scope, receive, send):
        if scope["type"] != "http":
            return
        headers = [(b"content-type", b"text/html"), (b"cross-origin-opener-policy", b"same-origin")]
        await send({{"type": "http.response.start", "status": 200, "headers": headers}})
        await send({{"type": "http.response.body", "body": b"<!doctype html><title>site</title>a page"}})
    return app
"""
GPUS = [
    {"uuid": "GPU-0a1b2c3d", "type": "gpu", "kind": "NVIDIA L4", "memory_bytes": 24 << 30},
    {
        "uuid": "GPU-1b2c3d4e",
        "type": "gpu",
        "kind": "NVIDIA L4",
        "memory_bytes": 24 << 30,
        "health": "degraded",
        "health_reason": "a row of its memory is being remapped",
    },
]


def test_the_console_in_a_browser(tmp_path: Path) -> None:
    chromium = shutil.which("chromium")
    if chromium is None or shutil.which("npx") is None or not (CONSOLE / "node_modules").is_dir():
        missing("chromium, Node.js or the packages of the console are not installed")
    if not BUILT.is_file():
        missing("the console is not built: run scripts/console")
    screenshots = os.environ.get("GPUFN_TEST_SCREENSHOTS", "")
    (tmp_path / "roles.toml").write_text('[groups]\ndevs = ["read"]\n')
    with contextlib.ExitStack() as stack:
        provider = stack.enter_context(issuer.serving())
        settings = {
            "GPUFN_DEVICES": json.dumps(GPUS),
            "GPUFN_OIDC_ISSUER": provider.url,
            "GPUFN_OIDC_CLIENT_ID": issuer.CLIENT,
            "GPUFN_OIDC_ROLES": str(tmp_path / "roles.toml"),
        }
        platform = stack.enter_context(running_platform(tmp_path / "home", environ=settings))
        _build_a_model(platform)
        for max_workers in (2, 3):
            (tmp_path / "app.py").write_text(APP.format(max_workers=max_workers))
            platform.gpufn("deploy", tmp_path / "app.py")
        assert platform.gpufn("console", "--no-browser").strip() == f"{platform.url}/console"
        ended = subprocess.run(
            ["npx", "vitest", "run", "--config", "vitest.browser.config.ts", "--reporter", "verbose"],
            cwd=CONSOLE,
            env={
                **os.environ,
                "GPUFN_TEST_URL": platform.url.replace("127.0.0.1", "localhost"),
                "GPUFN_TEST_HOME": str(platform.home),
                "GPUFN_TEST_CHROMIUM": chromium,
                "GPUFN_TEST_SCREENSHOTS": str(Path(screenshots).resolve()) if screenshots else "",
                "NO_COLOR": "1",
            },
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    if screenshots:
        _shrink(Path(screenshots))


def _build_a_model(platform: Platform) -> None:
    """Start a build that succeeds, and one that waits: no builder has such a GPU."""
    content = mlp().SerializeToString()
    file = {"name": "mlp.onnx", "digest": digest_of(content), "size": len(content)}
    platform.client.put(f"/v1/artifacts/{file['digest']}", content=content).raise_for_status()
    for device in ("cpu", "NVIDIA A100"):
        body = {"model": {"parameter": "model", "files": [file]}, "device": device}
        platform.client.post("/v1/builds", json=body).raise_for_status()


def _shrink(folder: Path) -> None:
    """Replace the screenshots by pictures of a third of their size."""
    from PIL import Image

    for path in folder.glob("console-*.png"):
        Image.open(path).save(path.with_suffix(".webp"), lossless=True, method=6)
        path.unlink()
