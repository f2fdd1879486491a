"""The options of an image, and how an image reaches the nodes."""

from __future__ import annotations

import re
import zipfile
from io import BytesIO
from pathlib import Path, PurePosixPath
from typing import Any

import pytest

from gpufn import Image
from gpufn.declare.image import prepare
from gpufn.deploy.bundle import load
from gpufn.deploy.deployables import deployables
from gpufn_core.errors import InvalidSpec
from gpufn_core.ids import digest_of
from gpufn_core.spec.image_spec import FILES_FOLDER, ImageFile, ImageSpec

APP = """\
from gpufn import Image, gpu_function

image = Image.python("3.12").pip_install("torch").pip_lock("lock.txt").add_file("names.txt", "/opt/names.txt")


@gpu_function(image=image, egress=True)
def f(x: int) -> int:
    return x


@gpu_function
def plain(x: int) -> int:
    return x
"""


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({}, "give the version of Python or the name of a base image, and not both"),
        ({"python": "3.12", "base": "debian"}, "and not both"),
        ({"python": "3.10"}, "Python '3.10': gpufn needs 3.11 or newer"),
        ({"python": "3.12\nRUN true"}, "gpufn needs 3.11 or newer"),
        ({"base": "debian\nRUN true"}, "is not the name of an image"),
        ({"base": "Debian:12"}, "'Debian:12' is not the name of an image"),
        ({"python": "3.12", "pip": ("torch\nnumpy",)}, "is not a requirement that pip installs"),
        ({"python": "3.12", "pip": ("-r/etc/passwd",)}, "is not a requirement that pip installs"),
        ({"python": "3.12", "apt": ("--allow-unauthenticated",)}, "is not a package that apt installs"),
        ({"python": "3.12", "apt": ("libgl1; reboot",)}, "is not a package that apt installs"),
        ({"python": "3.12", "pip": ("a",) * 501}, "more than 500 packages"),
        ({"python": "3.12", "lock": "x"}, "'x' is not a digest"),
    ],
)
def test_an_impossible_image_is_refused(spec: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidSpec, match=message):
        ImageSpec(**spec)


@pytest.mark.parametrize(
    ("method", "arguments", "message"),
    [
        ("python", (3.12,), "image: the version of Python is a string, such as '3.12', not 3.12"),
        ("from_name", (None,), "image: the name of a base image is a string, not None"),
        ("from_name", ("",), "image: '' is not the name of an image"),
        ("pip_install", (["a", "b"],), "an argument of its own, as in pip_install('torch', 'numpy'), not ['a', 'b']"),
        ("apt_install", (("a",),), "an argument of its own, as in apt_install('git', 'curl'), not ('a',)"),
        ("pip_lock", (["a"],), "image: the name of a file is a string, not ['a']"),
        ("add_file", ("a", 5), "image: the name of a file is a string, not 5"),
    ],
)
def test_a_value_that_is_not_a_string_is_refused_at_the_declaration(
    method: str, arguments: tuple[Any, ...], message: str
) -> None:
    with pytest.raises(InvalidSpec) as raised:
        getattr(Image.python("3.12"), method)(*arguments)
    assert message in raised.value.message


def test_files_can_be_path_objects() -> None:
    image = Image.python("3.12").pip_lock(Path("lock.txt")).add_file(Path("a/b"), PurePosixPath("/opt/b"))
    assert (image.lock, image.files) == ("lock.txt", (("a/b", "/opt/b"),))


@pytest.mark.parametrize("path", ["opt/x", "/opt/../etc/passwd", "/opt/", "/opt/$HOME", "/opt/a b", "/"])
def test_a_file_needs_a_plain_absolute_path(path: str) -> None:
    with pytest.raises(InvalidSpec, match=re.escape(repr(path))):
        ImageFile(path, "0" * 64)


def test_two_files_cannot_have_one_path() -> None:
    files = (ImageFile("/opt/x", "0" * 64), ImageFile("/opt/x", "1" * 64))
    with pytest.raises(InvalidSpec, match="the same path"):
        ImageSpec(python="3.12", files=files)


@pytest.mark.parametrize(
    "requirement",
    ["torch", "torch>=2,<3", "uvicorn[standard]==0.35", 'x; python_version < "3.12"', "x @ https://h/x.whl"],
)
def test_requirements_have_the_syntax_of_pip(requirement: str) -> None:
    assert ImageSpec(python="3.12", pip=(requirement,)).pip == (requirement,)


def test_the_digest_of_an_image_depends_on_its_declaration() -> None:
    one = ImageSpec(python="3.12", pip=("torch",))
    assert one.digest == ImageSpec(python="3.12", pip=("torch",)).digest
    assert one.digest != ImageSpec(python="3.12", pip=("torch",), apt=("libgl1",)).digest


def test_the_files_of_an_image_are_in_the_bundle_by_digest(tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(APP)
    (tmp_path / "names.txt").write_text("Ada")
    (tmp_path / "lock.txt").write_text("numpy==2.0.0")
    f, plain = deployables(load(tmp_path / "app.py").functions)
    names, lock = digest_of(b"Ada"), digest_of(b"numpy==2.0.0")
    assert f.spec.image == ImageSpec(
        python="3.12", pip=("torch",), lock=lock, files=(ImageFile("/opt/names.txt", names),)
    )
    assert (f.spec.egress, plain.spec.image, plain.spec.egress) == (True, None, False)
    with zipfile.ZipFile(BytesIO(f.data)) as archive:
        assert archive.read(f"{FILES_FOLDER}/{names}") == b"Ada"
        assert archive.read(f"{FILES_FOLDER}/{lock}") == b"numpy==2.0.0"


def test_a_missing_file_is_named_at_deploy(tmp_path: Path) -> None:
    with pytest.raises(InvalidSpec, match=r"image: cannot read nothing\.txt: "):
        prepare(Image.python("3.12").add_file("nothing.txt", "/opt/x"), tmp_path)


@pytest.mark.parametrize("there", ["/tmp/names.txt", "/gpufn/worker/names.txt", "/dev/shm/x", "/proc/x", "/sys/x"])
def test_a_file_that_a_mount_would_hide_is_refused(there: str, tmp_path: Path) -> None:
    (tmp_path / "names.txt").write_text("x")
    with pytest.raises(InvalidSpec, match=f"a mount hides {there} from workers"):
        prepare(Image.python("3.12").add_file("names.txt", there), tmp_path)
    for seen in ("/tmpl/names.txt", "/opt/tmp/names.txt"):
        assert prepare(Image.python("3.12").add_file("names.txt", seen), tmp_path).spec.files[0].path == seen


def test_code_sent_by_value_needs_the_same_python_in_its_image() -> None:
    from gpufn_core.spec.function_spec import EntryPoint, FunctionSpec, MethodSpec, Packaging

    by_value = EntryPoint("app", "f", Packaging.PICKLE)
    with pytest.raises(InvalidSpec, match=r"yours is 3\.11, its image's 3\.12"):
        FunctionSpec(name="f", entry=by_value, methods=(MethodSpec(),), python="3.11", image=ImageSpec(python="3.12"))
