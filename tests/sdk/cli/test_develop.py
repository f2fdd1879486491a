"""`gpufn init`, `gpufn diff` and the parts of `gpufn serve`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from io import BytesIO
from pathlib import Path

import msgspec
import pytest

from gpufn.cli.develop.init import TEMPLATES
from gpufn.cli.develop.spec_diff import file_changes, option_changes
from gpufn.cli.develop.watch import Stamp, Watch
from gpufn_core.spec.function_spec import EntryPoint, FunctionSpec, MethodSpec, ScalingPolicy
from tests.sdk.cli.commands import APP, VIEW, command
from tests.sdk.conftest import Project, StubGateway

SPEC = FunctionSpec(name="f", entry=EntryPoint("app", "f"), methods=(MethodSpec(),), env={"A": "secret"})


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_new_project_has_a_test_that_passes(template: str, project: Project) -> None:
    project({})
    assert command("init", template, "new one").exit_code == 0
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"],
        cwd="new one",
        env=os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},  # they take seconds to import
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout
    assert 'name = "new-one"' in Path("new one/pyproject.toml").read_text()


def test_init_overwrites_nothing(project: Project) -> None:
    project({"my-function/app.py": "mine"})
    assert command("init").exit_code == 2
    assert [path.name for path in Path("my-function").iterdir()] == ["app.py"]
    assert command("init", "unknown").exit_code == 2


def test_options_are_compared_by_the_names_that_users_write() -> None:
    after = msgspec.structs.replace(
        SPEC, scaling=ScalingPolicy(max_workers=8), timeout_s=5.0, env={"A": "other", "B": "new"}
    )
    changes = [(each.option, each.before, each.after) for each in option_changes(SPEC, after)]
    assert changes == [
        ("env.A", "set", "set to another value"),
        ("env.B", None, "set"),
        ("max_workers", 4, 8),
        ("timeout", 300.0, 5.0),
    ]
    assert "secret" not in str(changes)
    assert [each.option for each in option_changes(SPEC, after, knows_env=False)] == ["max_workers", "timeout"]


def test_files_are_compared_by_line() -> None:
    before, after = {"a.py": b"1\n2\n", "gone.py": b"x\n", "b": b"\xff"}, {"a.py": b"1\n3\n", "b": b"\xfe"}
    lines = list(file_changes(before, after, "f@1"))
    assert {"-2", "+3", "-x", "+++ /dev/null", "--- a.py (f@1)", "Binary files b (f@1) and b differ"} <= set(lines)
    assert list(file_changes(before, before, "f@1")) == []


def test_the_lock_of_an_image_is_compared_by_the_versions_of_its_packages() -> None:
    before = {".image/5f": b"numpy==2.0 \\\n    --hash=sha256:00 \\\n    --hash=sha256:01\n"}
    after = {".image/a0": b"numpy==2.1 \\\n    --hash=sha256:02\nuvloop==1.0 \\\n    --hash=sha256:03\n"}
    lines = list(file_changes(before, after, "f@1"))
    assert [line for line in lines if line[0] in "+-" and "image" not in line] == [
        "-numpy==2.0",
        "+numpy==2.1",
        "+uvloop==1.0",
    ]
    assert "/dev/null" not in str(lines)


def zipped(text: str) -> bytes:
    buffer = BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("app.py", text)
    return buffer.getvalue()


@pytest.mark.parametrize("may_read", [True, False])
def test_diff_shows_code_only_with_the_right_to_read_it(gateway: StubGateway, project: Project, may_read: bool) -> None:
    project(APP)
    gateway.on("GET /v1/functions", {"functions": [VIEW]})
    revisions = [{"number": 3, "created_at": 1.0, "bundle": "0" * 64, "state": "ready", "active": True}]
    gateway.on("GET /v1/functions/f/revisions", {"revisions": revisions})
    path = "GET /v1/functions/f"
    if may_read:
        gateway.on(path, VIEW)
        gateway.on(f"{path}/revisions/3/bundle", zipped("# old\n"), content_type="application/zip")
    else:
        for each in (path, f"{path}/revisions/3/bundle"):
            gateway.on(each, {"code": "forbidden"}, status=403)
    result = command("diff", "--json")
    difference = json.loads(result.stdout)
    assert result.exit_code == 1
    assert [each["function"] for each in difference["changed"]] == ["f"]
    assert ("-# old" in difference["files"]) is may_read


@pytest.mark.parametrize(("functions", "code"), [([], 1), (None, 3)])
def test_diff_of_an_undeployed_function(
    gateway: StubGateway, project: Project, monkeypatch: pytest.MonkeyPatch, functions: list[str] | None, code: int
) -> None:
    project(APP)
    if functions is None:
        monkeypatch.setenv("GPUFN_URL", "http://127.0.0.1:1")
    gateway.on("GET /v1/functions", {"functions": functions})
    result = command("diff")
    assert (result.exit_code, result.stdout) == (code, "+ f\n" if functions is not None else "")


class Files:
    """The stamps of files."""

    def __init__(self) -> None:
        self.stamps: dict[Path, Stamp] = {}

    def __call__(self, path: Path) -> Stamp:
        return self.stamps.get(path)

    def write(self, path: Path, at_ns: int) -> None:
        self.stamps[path] = (at_ns, 1, 1)


def test_a_change_is_seen_once() -> None:
    files, path = Files(), Path("app.py")
    files.write(path, 1)
    watch = Watch([path], files)
    assert not watch.has_changed()
    files.write(path, 2)
    assert [watch.has_changed(), watch.has_changed()] == [True, False]
    del files.stamps[path]
    assert watch.has_changed()


def test_a_file_that_was_written_while_it_was_read_has_changed() -> None:
    files, second = Files(), 1_000_000_000
    watch = Watch([], files)
    for name, at_ns, is_newer in (("old.py", second, False), ("new.py", 3 * second, True)):
        files.write(Path(name), at_ns)
        assert watch.add([Path(name)], 2 * second) is is_newer


def test_the_watch_settles_when_no_file_changes_any_more() -> None:
    files, path, writes = Files(), Path("app.py"), iter([2, 3])
    watch = Watch([path], files)
    waits: list[float] = []

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        if (at_ns := next(writes, None)) is not None:
            files.write(path, at_ns)

    watch.settle(sleep)
    assert len(waits) == 3
    assert not watch.has_changed()


@pytest.mark.parametrize(
    ("words", "code"), [(["missing.py"], 2), (["--env", "No", "app.py"], 2), (["app.py"], 3), ([], 2)]
)
def test_serve_checks_before_it_starts(
    words: list[str], code: int, project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    project(APP)
    monkeypatch.setenv("GPUFN_URL", "http://127.0.0.1:1")
    assert command("serve", *words).exit_code == code


def test_serve_ends_with_a_key_that_may_not_deploy(gateway: StubGateway, project: Project) -> None:
    project(APP)
    gateway.on("GET /healthz", {})
    gateway.on("GET /v1/functions", {"code": "unauthorized"}, status=401)
    assert command("serve", "app.py").exit_code == 5
