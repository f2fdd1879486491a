"""Volumes on a running platform: the command line, functions that read and commit."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpufn import Client, Dict, Queue, Ref, put
from gpufn.data import channel
from gpufn.data.http_channel import HttpChannel
from gpufn_core.errors import DataNotFound, InvalidInput
from tests.conftest import Platform, running_platform
from tests.s3_server import s3_server

pytestmark = pytest.mark.e2e

APP = Path(__file__).parent / "apps" / "data.py"


@contextlib.contextmanager
def installed(used: channel.Channel) -> Iterator[None]:
    channel.install(used)
    try:
        yield
    finally:
        channel.install(None)


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(shutil.copy(APP, tmp_path_factory.mktemp("project") / "data.py"))


@pytest.fixture(scope="module")
def shelf(platform: Platform, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shelf")
    (folder / "sub").mkdir()
    (folder / "a.bin").write_bytes(bytes(3 << 20))
    (folder / "sub" / "run.sh").write_text("#!/bin/sh\n")
    (folder / "sub" / "run.sh").chmod(0o755)
    platform.gpufn("volume", "put", "shelf-read", folder)
    return folder


def test_a_folder_is_uploaded_to_a_volume_and_downloaded(platform: Platform, shelf: Path, tmp_path: Path) -> None:
    again = platform.gpufn("volume", "put", "shelf-read", shelf)
    assert "version 1: 2 files" in again
    assert "sent 0 files" in again
    platform.gpufn("volume", "get", "shelf-read", "--to", tmp_path)
    assert (tmp_path / "a.bin").read_bytes() == bytes(3 << 20)
    assert (tmp_path / "sub" / "run.sh").stat().st_mode & 0o777 == 0o755
    files = json.loads(platform.gpufn("volume", "ls", "shelf-read", "--json"))["files"]
    assert [file["path"] for file in files] == ["a.bin", "sub/run.sh"]
    assert "shelf-read" in platform.gpufn("volume")


def test_a_function_reads_the_version_that_is_the_newest_when_its_worker_starts(
    platform: Platform, app: Path, shelf: Path
) -> None:
    platform.gpufn("deploy", app)
    expected = {"a.bin": [3 << 20, False], "sub/run.sh": [10, True]}
    assert platform.invoke("read-shelf") == {"version": 1, "files": expected}
    assert platform.invoke("read-as-process") == ["a.bin", "sub"]


def test_unknown_names_are_not_found(platform: Platform, tmp_path: Path) -> None:
    assert platform.try_gpufn("volume", "ls", "nothing").returncode == 4
    assert platform.try_gpufn("volume", "put", "nothing", tmp_path / "absent").returncode != 0
    (tmp_path / "app.py").write_text(
        "from gpufn import Volume, gpu_function\n@gpu_function(volumes=Volume('nothing'))\ndef f() -> None: ...\n"
    )
    refused = platform.try_gpufn("deploy", tmp_path / "app.py")
    assert refused.returncode != 0
    assert "gpufn volume put nothing" in refused.stderr


def test_the_files_of_volumes_may_be_in_an_s3_store(app: Path, shelf: Path, tmp_path: Path) -> None:
    bucket = tmp_path / "s3" / "ours"
    bucket.mkdir(parents=True)
    with (
        s3_server(bucket.parent) as aws,
        running_platform(tmp_path / "home", environ=aws | {"GPUFN_VOLUME_STORE": "s3://ours/files"}) as own,
    ):
        own.gpufn("volume", "put", "shelf-read", shelf)
        own.gpufn("deploy", app)
        assert own.invoke("read-shelf")["files"] == {"a.bin": [3 << 20, False], "sub/run.sh": [10, True]}
        assert own.invoke("write-shelf", {"name": "a"}) == 1
        own.gpufn("volume", "get", "shelf-written", "--to", tmp_path / "copy")
        assert (tmp_path / "copy" / "made" / "a").read_bytes() == b"a"
        assert len(list((bucket / "files").iterdir())) == 5  # three files, and the lists of two versions


def test_a_function_commits_new_versions(platform: Platform, app: Path, shelf: Path) -> None:
    platform.gpufn("deploy", app)
    large = (40 << 20) // len("large.bin")  # in several parts
    assert platform.invoke("write-shelf", {"name": "a"}) == 1
    assert platform.invoke("write-shelf", {"name": "large.bin", "size": large}) == 2
    assert platform.invoke("write-shelf", {"name": "b", "remove": "made/a"}) == 3
    files = json.loads(platform.gpufn("volume", "ls", "shelf-written", "--json"))["files"]
    assert {file["path"]: file["size"] for file in files} == {"made/b": 1, "made/large.bin": large * len("large.bin")}


def test_a_function_changes_only_the_volumes_that_it_declares_as_writable(platform: Platform, app: Path) -> None:
    platform.gpufn("deploy", app)
    assert platform.invoke("write-elsewhere") == ["InvalidInput", "Forbidden", "Forbidden", "InvalidInput"]


def test_clients_and_functions_share_queues_and_dicts(platform: Platform, app: Path, shelf: Path) -> None:
    with Client(platform.url) as client, installed(HttpChannel(client)):
        jobs, seen = Queue("data-jobs", lease=1), Dict("data-seen")
        seen["old"] = {"a": (1, 2)}
        jobs.put("fails once")
        platform.gpufn("deploy", app)
        result = platform.invoke("work")
        assert result == {"done": [["fails once"]], "left": 0, "seen": ["fails once", "old"]}
        assert seen["old"] == {"a": (1, 2)}
        jobs.put("second")
        with jobs.get(timeout=5) as job:
            assert job == "second"
        assert len(jobs) == 0
        with pytest.raises(TimeoutError):
            jobs.get(timeout=0)
        assert not seen.add("old", 1)
        del seen["old"]
        assert "old" not in seen
        with pytest.raises(KeyError):
            seen["old"]
        assert platform.invoke("take-from-another-app") == "Forbidden"


def test_a_stored_value_is_an_argument_of_calls(platform: Platform, app: Path, shelf: Path) -> None:
    with Client(platform.url) as client, installed(HttpChannel(client)):
        numbers = put(list(range(300_000)), ttl=60)
        platform.gpufn("deploy", app)
        expected = [sum(range(300_000))] * 2 + [2]
        assert client.invoke("total", numbers=numbers) == expected
        assert platform.invoke("total", {"numbers": {"id": numbers.id}}) == expected
        assert len(numbers.get()) == 300_000
        with pytest.raises(DataNotFound):
            Ref(numbers.id[:-1] + ("0" if numbers.id[-1] != "0" else "1")).get()
        with pytest.raises(DataNotFound):
            Ref("gpufn_arguments").get()
        with pytest.raises(InvalidInput):
            put(print)
