"""`gpufn run`, `serve` and `diff` on a whole platform: they leave no function, and no call is lost."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import signal
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import Platform
from tests.waiting import until

pytestmark = pytest.mark.e2e

APP = """
import time
from gpufn import gpu_function

@gpu_function(max_workers=1)
def shout(text: str, times: int = 1) -> str:
    print("shouting", text)
    return louder.remote(text) * times

@gpu_function(max_workers=1)
def louder(text: str) -> str:
    return text.upper()

@gpu_function(max_workers=1)
def sleepy() -> None:
    print("sleeping", flush=True)
    time.sleep(60)
"""
VERSION = """
import time
from pathlib import Path
from gpufn import gpu_function

@gpu_function(max_workers=2)
def version(folder: str = "") -> str:
    if folder:
        Path(folder, "started").touch()
        while not Path(folder, "go").exists():
            time.sleep(0.01)
    return "one"
"""


def functions_in(platform: Platform, env: str) -> list[str]:
    functions = platform.client.get("/v1/functions").json()["functions"]
    return [each["name"] for each in functions if each["name"].startswith(env)]


@contextlib.contextmanager
def started(platform: Platform, *arguments: str | Path) -> Iterator[subprocess.Popen[str]]:
    """A command with its output in one pipe, killed at the end unless it has ended."""
    process = subprocess.Popen(
        [sys.executable, "-u", "-m", "gpufn", *arguments],
        env=os.environ | {"GPUFN_URL": platform.url, "GPUFN_HOME": str(platform.home)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def read_until(process: subprocess.Popen[str], text: str) -> None:
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if text in line:
            return
    pytest.fail("".join(lines))


def test_run_calls_a_function_and_leaves_nothing(platform: Platform, tmp_path: Path) -> None:
    file = tmp_path / "app.py"
    file.write_text(APP)
    ended = platform.try_gpufn("run", f"{file}::shout", "--text", "a", "--times", "2")
    assert (ended.returncode, ended.stdout) == (0, '"AA"\n')
    assert "shout | shouting a\n" in ended.stderr
    assert functions_in(platform, "run-") == []
    with started(platform, "run", f"{file}::sleepy") as process:
        read_until(process, "sleeping")
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 130
    assert functions_in(platform, "run-") == []


def test_leftovers_of_a_killed_client_disappear(platform: Platform) -> None:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("app.py", "def f(): ...")
    digest = hashlib.sha256(buffer.getvalue()).hexdigest()
    headers = {"content-type": "application/zip"}
    assert platform.client.put(f"/v1/bundles/{digest}", content=buffer.getvalue(), headers=headers).status_code == 201
    spec = {"name": "dev-killed/default/f", "entry": {"module": "app", "qualname": "f"}, "methods": [{}]}
    body = {"spec": spec, "bundle": digest, "check": False, "lease": {"id": "a", "ttl_s": 1}}
    assert platform.client.post("/v1/functions", json=body).status_code == 201
    until(lambda: not functions_in(platform, "dev-killed"))


def test_serve_follows_the_file_without_losing_a_call(platform: Platform, tmp_path: Path) -> None:
    file, name = tmp_path / "app.py", "dev-test/default/version"
    file.write_text(VERSION)
    with started(platform, "serve", file, "--env", "dev-test") as process:
        read_until(process, f"{name}@1")
        with started(platform, "invoke", name, json.dumps({"folder": str(tmp_path)})) as call:
            until((tmp_path / "started").exists)
            file.write_text(VERSION.replace("one", "two"))
            read_until(process, f"{name}@2")
            assert platform.invoke(name) == "two"
            (tmp_path / "go").touch()
            assert call.stdout is not None
            output = call.stdout.read()
            assert (call.wait(20), output) == (0, '"one"\n')
        assert platform.gpufn("diff", file, "--env", "dev-test") == ""
        changed = tmp_path / "changed.py"
        changed.write_text(VERSION.replace("max_workers=2", "max_workers=3"))
        difference = platform.try_gpufn("diff", changed, "--env", "dev-test")
        assert (difference.returncode, '-    return "two"' in difference.stdout) == (1, True)
        assert "    max_workers  2 → 3" in difference.stdout.splitlines()
        file.write_text("def broken(:")
        read_until(process, f"still serving {name}@2")
        assert platform.invoke(name) == "two"
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 130
    assert functions_in(platform, "dev-test") == []
