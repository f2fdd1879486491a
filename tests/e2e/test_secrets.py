"""Secrets on a whole platform: delivered to workers, redacted in output and errors, changed without losing a call."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpufn_core.home import Home
from tests.conftest import Platform, http_client, running_platform
from tests.waiting import until

pytestmark = pytest.mark.e2e

OLD, NEW = "hf_old-correct-horse-battery", "hf_new-staple-of-the-horse"
CALLERS = 2

APP = """
import base64, hashlib, logging, os, subprocess, sys, time
from gpufn import gpu_function

SECRET = os.environ.get("THE_TOKEN", "")

@gpu_function(secrets=["THE_TOKEN"], max_workers=2)
def keeps() -> dict:
    value = os.environ["THE_TOKEN"]
    with open("/proc/self/environ", "rb") as file:
        start = file.read()
    return {
        "sha256": hashlib.sha256(value.encode()).hexdigest(),
        "on_import": SECRET == value,
        "in_proc": value.encode() in start,
    }

@gpu_function(secrets=["THE_TOKEN"], max_workers=1)
def leaks(how: str) -> None:
    value = os.environ["THE_TOKEN"]
    encoded = base64.b64encode(("user:" + value).encode()).decode()
    print("whole", value, "encoded", encoded)
    print("split " + value[:9], end="")
    print(value[9:])
    logging.getLogger("leak").warning("logged %s", value)
    os.write(1, ("raw " + value[:5]).encode())
    time.sleep(0.05)
    os.write(1, (value[5:] + chr(10)).encode())
    subprocess.run([sys.executable, "-c", "import os; print('child', os.environ['THE_TOKEN'])"], check=True)
    if how == "raise":
        raise ValueError("bad token " + value)
    if how == "die":
        os.write(2, ("last words " + value + chr(10)).encode())
        os._exit(9)
"""


@pytest.fixture(scope="module")
def secretive(platform: Platform) -> Iterator[Platform]:
    yield platform
    for function in ("keeps", "leaks"):  # a secret that a function uses cannot be removed
        platform.client.delete(f"/v1/functions/{function}").raise_for_status()
    platform.gpufn("secrets", "rm", "THE_TOKEN", "--yes")


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One file for all tests: a deploy from another folder does not replace a function that is being restarted."""
    path = tmp_path_factory.mktemp("app") / "app.py"
    path.write_text(APP)
    return path


def set_secret(platform: Platform, name: str, value: str) -> dict[str, Any]:
    answer = platform.client.put(f"/v1/secrets/{name}", json={"value": value})
    assert answer.status_code == 200, answer.text
    view: dict[str, Any] = answer.json()
    return view


def sha256(value: str) -> str:
    return hashlib.sha256(value.encode()).hexdigest()


def files_with(folder: Path, value: str) -> list[str]:
    found = []
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink() and value.encode() in path.read_bytes():
            found.append(os.fspath(path))
    return found


def test_a_deploy_without_the_secret_names_it_and_the_command(secretive: Platform, app: Path) -> None:
    ended = secretive.try_gpufn("deploy", app)
    assert ended.returncode == 1
    assert "gpufn secrets set THE_TOKEN" in ended.stderr


def test_workers_receive_the_secret_and_no_file_holds_it(secretive: Platform, app: Path) -> None:
    set_secret(secretive, "THE_TOKEN", OLD)
    secretive.gpufn("deploy", app)
    assert secretive.invoke("keeps") == {"sha256": sha256(OLD), "on_import": True, "in_proc": False}
    listed = json.loads(secretive.gpufn("secrets", "ls", "--json"))
    assert [(each["name"], each["version"], each["functions"]) for each in listed] == [
        ("THE_TOKEN", 1, ["keeps", "leaks"])
    ]
    home = Home(secretive.home)
    assert home.master_key.stat().st_mode & 0o777 == 0o600
    assert files_with(secretive.home, OLD) == []
    assert files_with(home.run, OLD) == []


@pytest.mark.parametrize("how", ["raise", "die"])
def test_output_and_errors_are_redacted(secretive: Platform, app: Path, how: str) -> None:
    set_secret(secretive, "THE_TOKEN", OLD)
    secretive.gpufn("deploy", app)
    answer = secretive.post("leaks", {"how": how})
    assert answer.status_code >= 400
    assert "[redacted]" in answer.text

    def lines() -> str:
        return secretive.client.get("/v1/functions/leaks/logs?tail=200").text

    expected = ["whole [redacted]", "split [redacted]", "logged [redacted]", "raw [redacted]", "child [redacted]"]
    until(lambda: all(text in lines() for text in expected), lines)
    core = base64.b64encode(OLD[2:].encode()).decode()[4:-4]
    for shown in (answer.text, lines()):
        assert OLD not in shown
        assert OLD[9:] not in shown
        assert core not in shown


def test_dead_letters_are_redacted(secretive: Platform, app: Path) -> None:
    set_secret(secretive, "THE_TOKEN", OLD)
    secretive.gpufn("deploy", app)
    submitted = secretive.client.post("/v1/functions/leaks/submit", json={"how": "raise"}).json()
    until(lambda: secretive.client.get(f"/v1/invocations/{submitted['id']}").json()["state"] == "failed")
    letters = secretive.client.get("/v1/dlq").text
    assert "bad token [redacted]" in letters
    assert OLD not in letters


def test_a_changed_value_replaces_the_workers_and_no_call_is_lost(secretive: Platform, app: Path) -> None:
    set_secret(secretive, "THE_TOKEN", OLD)
    secretive.gpufn("deploy", app)
    answers: list[str] = []
    stop = threading.Event()

    def call() -> None:
        with http_client(secretive.url) as client:
            while not stop.is_set():
                answer = client.post("/v1/functions/keeps/invoke", json={})
                answers.append(answer.json()["sha256"] if answer.status_code == 200 else answer.text)

    threads = [threading.Thread(target=call) for _ in range(CALLERS)]
    for thread in threads:
        thread.start()
    try:
        until(lambda: sha256(OLD) in answers)
        view = set_secret(secretive, "THE_TOKEN", NEW)
        assert view["functions"] == ["keeps", "leaks"]
        until(lambda: set(answers[-20:]) == {sha256(NEW)}, lambda: answers[-3:])
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert set(answers) == {sha256(OLD), sha256(NEW)}


def test_workers_receive_the_secret_of_their_app_as_long_as_there_is_one(secretive: Platform, app: Path) -> None:
    set_secret(secretive, "THE_TOKEN", OLD)
    secretive.gpufn("deploy", app)
    set_secret(secretive, "THE_TOKEN?scope=default/*", NEW)
    until(lambda: secretive.invoke("keeps")["sha256"] == sha256(NEW))
    secretive.gpufn("secrets", "rm", "THE_TOKEN", "--yes", "--env", "default")
    until(lambda: secretive.invoke("keeps")["sha256"] == sha256(OLD))


def test_after_a_rotation_new_workers_start_with_the_same_value(secretive: Platform, app: Path) -> None:
    set_secret(secretive, "THE_TOKEN", NEW)
    secretive.gpufn("deploy", app)
    key = Home(secretive.home).master_key
    before = key.read_text()
    secretive.gpufn("secrets", "rotate")
    assert key.read_text() != before
    set_secret(secretive, "THE_TOKEN", OLD)
    until(lambda: secretive.invoke("keeps")["sha256"] == sha256(OLD))


def test_a_wrong_master_key_stops_the_start_and_loses_nothing(tmp_path: Path, app: Path) -> None:
    home = tmp_path / "home"
    with running_platform(home) as platform:
        set_secret(platform, "THE_TOKEN", OLD)
        platform.gpufn("deploy", app, "--no-check")
    key = Home(home).master_key
    right = key.read_text()
    key.write_text(base64.b64encode(bytes(32)).decode())
    ended = subprocess.run(
        [sys.executable, "-m", "gpufn", "up", "--port", "0"],
        env=os.environ | {"GPUFN_HOME": str(home)}, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert ended.returncode != 0
    assert "GPUFN_MASTER_KEY_FILE" in ended.stderr
    assert "THE_TOKEN" in ended.stderr
    with running_platform(home, environ={"GPUFN_MASTER_KEY": right}) as platform:
        assert platform.invoke("keeps")["sha256"] == sha256(OLD)
