"""Weights on a running platform, with a hub on this machine."""

from __future__ import annotations

import os
import re
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpufn_core.home import Home
from tests.conftest import Platform, running_platform
from tests.waiting import until
from tests.weights_origins import Origins, running_origins

pytestmark = pytest.mark.e2e

APP = Path(__file__).parent / "apps" / "weighty.py"
_FILES = {"config.json": b"{}", "model.bin": bytes(3 << 20)}


@pytest.fixture(scope="module")
def origins() -> Iterator[Origins]:
    with running_origins(dict(_FILES)) as origins:
        origins.token = "hf_secret"
        yield origins


@pytest.fixture(scope="module")
def weighed(tmp_path_factory: pytest.TempPathFactory, origins: Origins) -> Iterator[Platform]:
    with (
        pytest.MonkeyPatch.context() as patch,
        running_platform(
            tmp_path_factory.mktemp("home"), environ={**origins.environ(), "HF_TOKEN": "hf_secret"}
        ) as platform,
    ):
        for name, text in {**origins.environ(), "HF_TOKEN": "hf_secret"}.items():
            patch.setenv(name, text)  # for `gpufn deploy`
        yield platform


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("project")
    (folder / "weights" / "sub").mkdir(parents=True)
    (folder / "weights" / "a.bin").write_bytes(b"aa")
    (folder / "weights" / "sub" / "b.bin").write_bytes(bytes(2 << 20))
    (folder / "weights" / "notes.txt").write_text("left out")
    return Path(shutil.copy(APP, folder / "weighty.py"))


def _why(platform: Platform, function: str) -> dict[str, Any]:
    view: dict[str, Any] = platform.client.get(f"/v1/functions/{function}/why").json()
    return view


def test_weights_go_from_a_deploy_to_the_workers(weighed: Platform, app: Path, origins: Origins) -> None:
    origins.hold = threading.Event()
    deployed = threading.Thread(target=weighed.gpufn, args=("deploy", app))
    deployed.start()
    try:
        progress = until(
            lambda: re.search(
                r"fetches the weights hf://org/model: (.*) of 3 MiB", _why(weighed, "weigh-hub").get("reason", "")
            )
        )
        assert progress[1] != "3 MiB"
    finally:
        origins.hold.set()
        origins.hold = None
        deployed.join()
    assert weighed.invoke("weigh") == {"a.bin": 2, "sub/b.bin": 2 << 20}
    assert weighed.invoke("weigh-hub") == {name: len(data) for name, data in _FILES.items()}
    assert weighed.invoke("look-away") == "ArtifactUnavailable"
    fetched = re.compile(r"gpufn_weights_fetched_bytes_total\{node=\".*\"\} [1-9]")
    until(lambda: fetched.search(weighed.client.get("/metrics").text))


def test_a_second_deploy_fetches_nothing(weighed: Platform, app: Path, origins: Origins) -> None:
    weighed.gpufn("deploy", app)
    before = len(origins.downloads("model.bin"))
    with app.open("a") as file:
        file.write("\nCHANGED = True\n")
    weighed.gpufn("deploy", app)
    assert weighed.invoke("weigh-hub")["model.bin"] == 3 << 20
    assert len(origins.downloads("model.bin")) == before


def test_wrong_weights_fail_the_deploy_and_the_old_revision_serves(
    weighed: Platform, app: Path, origins: Origins
) -> None:
    weighed.gpufn("deploy", app)
    other = b"x" * (3 << 20)
    origins.files["model.bin"], served = other, origins.served["model.bin"]
    try:
        failed = weighed.try_gpufn("deploy", app)
        assert failed.returncode != 0
        assert "model.bin" in failed.stderr
        assert weighed.invoke("weigh-hub")["model.bin"] == len(served)
        assert weighed.invoke("weigh")["a.bin"] == 2
    finally:
        origins.files["model.bin"] = served


def test_only_the_agent_has_the_credentials(weighed: Platform, app: Path) -> None:
    """A worker is a process of the same user, and reads the environments of this user's processes."""
    supervisor = weighed.process.pid
    found = [
        path.parent.name
        for path in Path("/proc").glob("[0-9]*/environ")
        if (status := path.parent / "stat").exists() and b"hf_secret" in _read(path) and _parent(status) == supervisor
    ]
    assert found == []
    assert b"hf_secret" not in _read(Path(f"/proc/{supervisor}/environ"))
    assert Home(weighed.home).up_file.exists()
    assert os.environ["HF_TOKEN"] == "hf_secret"


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def _parent(stat: Path) -> int:
    try:
        return int(stat.read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0
