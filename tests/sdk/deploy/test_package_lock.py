"""The lock of an image, resolved by uv from a folder of wheels."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from gpufn import Image, gpu_function
from gpufn.declare.image import prepare
from gpufn.deploy.deployables import deployables
from gpufn_core.errors import InvalidSpec
from gpufn_core.spec.image_spec import FILES_FOLDER
from tests.wheels import use_only, write_wheel


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, version in (("cloudpickle", "3.1"), ("msgspec", "0.20"), ("tint", "1"), ("tint", "2")):
        write_wheel(tmp_path / "wheels", name, version, "")
    use_only(tmp_path / "wheels", monkeypatch)
    return tmp_path


def lock_of(image: Image, folder: Path) -> list[str]:
    """The packages of the lock, with versions."""
    prepared = prepare(image, folder)
    assert not prepared.spec.needs_container
    text = prepared.contents[f"{FILES_FOLDER}/{prepared.spec.locked}"].decode()
    assert "--hash=sha256:" in text
    return [line.split()[0] for line in text.splitlines() if line[:1].isalpha()]


def test_a_lock_has_the_packages_and_those_of_a_worker(folder: Path) -> None:
    (folder / "requirements.txt").write_text("tint<2\n")
    needs = ["cloudpickle==3.1", "msgspec==0.20"]
    assert lock_of(Image.python("3.12").pip_install("tint"), folder) == [*needs, "tint==2"]
    assert lock_of(Image().requirements(), folder) == [*needs, "tint==1"]
    fixed = "tint==1 --hash=sha256:" + "0" * 64 + "\n"
    (folder / "lock.txt").write_text(fixed)
    assert lock_of(Image().pip_lock("lock.txt"), folder) == ["tint==1", *needs]
    (folder / "pyproject.toml").write_text('[project]\nname = "p"\nversion = "1"\ndependencies = ["tint"]\n')
    assert lock_of(Image().pyproject(), folder) == [*needs, "tint==2"]


@pytest.mark.parametrize(
    ("image", "words"),
    [
        (Image().pip_install("nothing"), "cannot be resolved: error: No solution found"),
        (Image().pip_install("msgspec<0.1"), "msgspec"),
        (Image().requirements("absent.txt"), "cannot read absent.txt"),
        (Image().pip_lock("plain.txt"), "needs hashes"),
    ],
)
def test_a_package_that_cannot_be_locked_is_reported_with_the_reason(image: Image, words: str, folder: Path) -> None:
    (folder / "plain.txt").write_text("tint\n")
    with pytest.raises(InvalidSpec, match=words):
        prepare(image, folder)


def test_only_apt_packages_and_files_need_a_container(folder: Path) -> None:
    assert prepare(Image.python("3.12").apt_install("git"), folder).spec.needs_container
    with pytest.raises(InvalidSpec, match="add_file"):
        Image().copy_local("wheels", "/opt/wheels")
    with pytest.raises(InvalidSpec, match="below the working folder"):
        Image().copy_local("wheels", "../wheels")
    copied = prepare(Image().copy_local("wheels", "w"), folder).contents
    assert "w/tint-1-py3-none-any.whl" in copied


def test_without_uv_the_deploy_names_the_way_to_install_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpufn.deploy.package_lock.find_uv", lambda: None)
    with pytest.raises(InvalidSpec, match="pip install uv"):
        prepare(Image(), folder)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Image.from_name("debian").requirements(),
        lambda: Image.python("3.12", machine="sparc"),
        lambda: Image().run("a\nb"),
        lambda: Image().env(A=1),  # type: ignore[arg-type]
    ],
)
def test_an_impossible_image_is_refused_at_the_declaration(make: Callable[[], Image]) -> None:
    with pytest.raises(InvalidSpec, match="image: "):
        make()


def test_workers_have_the_variables_of_the_image_unless_the_function_sets_them(folder: Path) -> None:
    @gpu_function(image=Image().env(A="image", B="image"), env={"B": "function"})
    def f() -> None: ...

    (deployable,) = deployables([f])
    assert deployable.spec.env == {"A": "image", "B": "function"}
    assert not deployable.spec.in_container
