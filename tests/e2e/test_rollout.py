"""A new revision under load: callers notice only the new answers.

Callers in threads call one function without a pause; a call takes 0.02 s. No call may fail, and no call may wait for a
worker to start: a cold start shows in the `Server-Timing` of the response.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from gpufn import Function
from gpufn_core.errors import FunctionNotFound, InvalidInput
from tests.conftest import Platform, http_client
from tests.waiting import until

pytestmark = pytest.mark.e2e

CALLERS = 4
WITHIN_S = 30.0

_numbers = itertools.count()

SERVES = """
import time

from gpufn import gpu_function

@gpu_function(name="{name}", max_workers=2, concurrency=2)
def rolls(number: int) -> list[int]:
    time.sleep(0.02)
    return [{version}, number]
"""

# The file exists on the deploying machine, and is not part of the bundle.
CANNOT_START = """
from pathlib import Path
from gpufn import gpu_function

WEIGHTS = (Path(__file__).parent / "weights.txt").read_text()

@gpu_function(name="{name}", max_workers=2, concurrency=2)
def rolls(number: int) -> list[int]:
    return [{version}, number]
"""


class Load:
    """Callers in threads, and the answers in the order of their arrival."""

    def __init__(self, platform: Platform, function: str) -> None:
        self._platform = platform
        self._function = function
        self._changed = threading.Condition()
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._call, daemon=True) for _ in range(CALLERS)]
        self.versions: list[int] = []
        self.failed: list[str] = []
        self.cold: list[str] = []

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(WITHIN_S)

    def wait_until(self, condition: Callable[[], bool]) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self.failed or condition(), WITHIN_S), self.versions[-5:]
        assert self.failed == []

    def wait_for(self, version: int) -> None:
        """Wait until this version answers the calls of all callers."""
        self.wait_until(lambda: len(self.versions) > 50 and set(self.versions[-50:]) == {version})

    def wait_for_more(self, answers: int) -> None:
        goal = len(self.versions) + answers
        self.wait_until(lambda: len(self.versions) >= goal)

    def wait_for_failures(self, count: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.failed) >= count, WITHIN_S)

    def _call(self) -> None:
        number = 0
        with http_client(self._platform.url, timeout_s=WITHIN_S) as client:
            while not self._stop.is_set():
                number += 1
                answer = client.post(f"/v1/functions/{self._function}/invoke", json={"number": number})
                self._take(answer, number)

    def _take(self, answer: httpx.Response, number: int) -> None:
        with self._changed:
            if answer.status_code != 200 or answer.json()[1] != number:
                self.failed.append(f"{answer.status_code} {answer.text}")
            else:
                self.versions.append(answer.json()[0])
            if "launch" in answer.headers.get("server-timing", ""):
                self.cold.append(answer.headers["server-timing"])
            self._changed.notify_all()


class Project:
    """A file that is deployed again and again."""

    def __init__(self, platform: Platform, file: Path, name: str) -> None:
        self.platform = platform
        self.name = name
        self._file = file

    def deploy(self, source: str, version: int, *options: str) -> None:
        self._file.write_text(source.format(name=self.name, version=version))
        view = json.loads(self.platform.gpufn("deploy", self._file, "--json", *options))[0]
        assert view["active"] == version

    def try_deploy(self, source: str, version: int) -> tuple[int, str]:
        """The exit code and what the command wrote to standard error."""
        self._file.write_text(source.format(name=self.name, version=version))
        ended = self.platform.try_gpufn("deploy", self._file)
        return ended.returncode, ended.stderr

    def wait_for_workers(self, count: int) -> None:
        until(lambda: sum(self.view()["workers"].values()) == count, self.view)

    def view(self) -> dict[str, Any]:
        view: dict[str, Any] = self.platform.client.get(f"/v1/functions/{self.name}").json()
        return view


@pytest.fixture
def project(platform: Platform, tmp_path: Path) -> Iterator[Project]:
    name = f"rolls-{next(_numbers)}"  # revisions of a used name would not start at 1
    (tmp_path / "weights.txt").touch()
    project = Project(platform, tmp_path / "rolling.py", name)
    project.deploy(SERVES, 1)
    assert platform.invoke(name, {"number": 1}) == [1, 1]
    yield project
    platform.client.delete(f"/v1/functions/{name}")


def test_calls_stay_warm_and_none_fails_during_a_rollout(project: Project) -> None:
    with Load(project.platform, project.name) as load:
        load.wait_for(1)
        load.cold.clear()
        project.deploy(SERVES, 2)
        load.wait_for(2)
        project.platform.client.post(f"/v1/functions/{project.name}/rollback", json={}).raise_for_status()
        load.wait_for(1)
        project.deploy(SERVES, 3)
        project.deploy(SERVES, 4)
        load.wait_for(4)
    assert (load.failed, load.cold) == ([], [])
    assert project.view()["serving"] == 4


def test_a_revision_that_cannot_start_leaves_the_old_one_serving(project: Project) -> None:
    with Load(project.platform, project.name) as load:
        load.wait_for(1)
        load.cold.clear()
        project.deploy(CANNOT_START, 2, "--no-wait", "--no-check")
        load.wait_until(lambda: (project.view()["next"] or {}).get("start_error") is not None)
        assert (project.view()["next"]["revision"], project.view()["serving"]) == (2, 1)
        assert "weights.txt" in project.view()["next"]["start_error"]["message"]
        load.wait_for_more(100)
        project.deploy(SERVES, 3)
        load.wait_for(3)
    assert (load.failed, load.cold) == ([], [])
    assert 2 not in load.versions


def test_a_deploy_that_cannot_start_fails_while_the_old_revision_has_no_worker(project: Project) -> None:
    project.platform.gpufn("scale", project.name, "--max", "0")
    project.wait_for_workers(0)
    project.platform.gpufn("scale", project.name)
    code, text = project.try_deploy(CANNOT_START, 2)
    assert code == 1
    assert f"{project.name}@2 does not start, {project.name}@1 still serves: FileNotFoundError" in text
    assert 'rolling.py, line 5: WEIGHTS = (Path(__file__).parent / "weights.txt").read_text()' in text
    assert (project.view()["active"], project.view()["serving"]) == (1, 1)
    assert project.platform.client.get(f"/v1/functions/{project.name}/revisions/2").json()["state"] == "failed"
    assert project.platform.invoke(project.name, {"number": 1}) == [1, 1]


def test_calls_of_a_function_whose_first_deploy_failed_get_the_reason_at_once(
    platform: Platform, tmp_path: Path
) -> None:
    (tmp_path / "weights.txt").touch()
    project = Project(platform, tmp_path / "rolling.py", f"rolls-{next(_numbers)}")
    code, text = project.try_deploy(CANNOT_START, 1)
    assert (code, "does not start" in text) == (1, True)
    answer = platform.client.post(f"/v1/functions/{project.name}/invoke", json={"number": 1})
    assert (answer.status_code, answer.json()["code"]) == (503, "function_start_failed")
    assert "weights.txt" in answer.json()["detail"]
    project.deploy(SERVES, 2)
    assert platform.invoke(project.name, {"number": 1}) == [2, 1]


def test_a_deploy_starts_a_worker_unless_it_is_not_to_be_checked(platform: Platform, tmp_path: Path) -> None:
    project = Project(platform, tmp_path / "rolling.py", f"rolls-{next(_numbers)}")
    project.deploy(SERVES, 1)
    until(lambda: platform.ready_workers(project.name) == 1)
    (tmp_path / "weights.txt").touch()
    unchecked = Project(platform, tmp_path / "rolling.py", f"rolls-{next(_numbers)}")
    unchecked.deploy(CANNOT_START, 1, "--no-check")
    assert platform.ready_workers(unchecked.name) == 0


def test_a_deploy_that_cannot_start_fails_under_load_and_no_caller_notices(project: Project) -> None:
    with Load(project.platform, project.name) as load:
        load.wait_for(1)
        load.cold.clear()
        code, text = project.try_deploy(CANNOT_START, 2)
        assert (code, "weights.txt" in text) == (1, True)
        load.wait_for_more(50)
    assert (load.failed, load.cold, project.view()["active"]) == ([], [], 1)


TWO = """
from gpufn import gpu_function, method

@gpu_function(name="{name}-counts", idle_timeout=600)
class Counts:
    total = 0

    @method
    def add(self) -> int:
        self.total += 1
        return self.total

@gpu_function(name="{name}")
def rolls(number: int) -> list[int]:
    return [{version}, number]
"""


def test_a_change_of_one_function_keeps_the_workers_of_the_others(platform: Platform, tmp_path: Path) -> None:
    name = f"rolls-{next(_numbers)}"
    file = tmp_path / "rolling.py"
    for version in (1, 2):
        file.write_text(TWO.format(name=name, version=version))
        text = platform.gpufn("deploy", file)
        assert ("counts@1" in text, f"{name}@{version} " in text, "unchanged" in text) == (True, True, version == 2)
        assert platform.invoke(name, {"number": 7}) == [version, 7]
        assert platform.invoke(f"{name}-counts.add") == version, "the instance has lost its state"


MISTYPED = """
import numpyy
from gpufn import gpu_function

@gpu_function(name="{name}")
def rolls(number: int) -> list[int]:
    return [{version}, number]
"""


def test_a_package_that_the_node_lacks_fails_the_deploy_with_the_line(platform: Platform, tmp_path: Path) -> None:
    project = Project(platform, tmp_path / "rolling.py", f"rolls-{next(_numbers)}")
    code, text = project.try_deploy(MISTYPED, 1)
    assert code == 1
    assert "without numpyy: not installed here" in text
    assert "does not start: ModuleNotFoundError: No module named 'numpyy'\n  rolling.py, line 2: import numpyy" in text


COUNTS = """
from gpufn import gpu_function, method

@gpu_function(name="{name}-counts")
class Counts:
    @method
    def add(self, number: int, to: int = 1) -> int:
        return number + to

@gpu_function(name="{name}-steps")
def steps(until: int):
    yield from range(until)
"""


def test_a_deployed_function_is_called_by_its_name_with_every_verb(
    platform: Platform, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPUFN_URL", platform.url)
    name = f"rolls_{next(_numbers)}"
    (tmp_path / "rolling.py").write_text(COUNTS.format(name=name.replace("_", "-")))
    platform.gpufn("deploy", tmp_path / "rolling.py")
    add, steps = Function.from_name(f"{name}_counts.add"), Function.from_name(f"{name}-steps")
    assert (add.remote(2), add.remote(2, to=3), add.spawn(number=4).result()) == (3, 5, 5)
    assert (list(add.map([1, 2])), list(add.starmap([(1, 2), (3, 4)]))) == ([2, 3], [3, 7])
    assert (list(steps.stream(3)), steps.remote(3)) == ([0, 1, 2], [0, 1, 2])
    assert add.options(timeout=20).remote(1) == 2
    assert list(steps.options(priority="low").stream(2)) == [0, 1]

    async def awaited() -> list[int]:
        return [await add.aio.remote(5), *[item async for item in steps.aio.stream(2)]]

    assert asyncio.run(awaited()) == [6, 0, 1]
    with pytest.raises(InvalidInput):
        add.remote("two")
    with pytest.raises(FunctionNotFound):
        Function.from_name("no-such-function").remote()
    with pytest.raises(InvalidInput, match="cannot run in this process"):
        add(1)


def test_submitted_calls_of_an_old_revision_end(project: Project) -> None:
    """A new revision does not strand the calls that were accepted for the old one."""
    client = project.platform.client
    with Load(project.platform, project.name):
        ids = []
        for number in range(100):
            answer = client.post(f"/v1/functions/{project.name}/submit", json={"number": number})
            ids.append(answer.json()["id"])
            if number == 50:
                project.deploy(SERVES, 2)
        answers = [client.get(f"/v1/invocations/{each}/result", params={"wait": 30}) for each in ids]
    assert [(answer.status_code, answer.json()[1]) for answer in answers] == [(200, number) for number in range(100)]


def test_a_function_deleted_under_load_notifies_its_callers(project: Project) -> None:
    platform = project.platform
    with http_client(platform.url, timeout_s=WITHIN_S) as client:
        with Load(platform, project.name) as load:
            load.wait_for(1)
            assert client.delete(f"/v1/functions/{project.name}").status_code == 204
            load.wait_for_failures(20)
        codes = {json.loads(failure.partition(" ")[2])["code"] for failure in load.failed}
        assert "function_not_found" in codes
        assert codes <= {"function_not_found", "invocation_cancelled"}
        assert client.get(f"/v1/functions/{project.name}").status_code == 404


def test_a_deleted_function_leaves_only_its_number_and_continues_counting_when_deployed_again(project: Project) -> None:
    project.deploy(SERVES, 2)
    client, revisions = project.platform.client, f"/v1/functions/{project.name}/revisions"
    project.platform.gpufn("rm", project.name, "--yes")
    give_up_at = time.monotonic() + WITHIN_S
    while client.get(f"{revisions}/1").status_code != 404 or client.get(f"{revisions}/2").json()["bundle"]:
        assert time.monotonic() < give_up_at, client.get(f"{revisions}/2").text
        time.sleep(0.05)
    project.deploy(SERVES, 3)
    assert project.platform.invoke(project.name, {"number": 1}) == [3, 1]
