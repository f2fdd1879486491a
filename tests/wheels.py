"""Wheels for a folder that pip and uv install from without a network."""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest


def use_only(folder: Path, patch: pytest.MonkeyPatch) -> None:
    """Let uv take packages from `folder` only, and from no network or cache."""
    patch.setenv("UV_OFFLINE", "1")
    patch.setenv("UV_FIND_LINKS", str(folder))
    patch.setenv("UV_CACHE_DIR", str(folder.parent / "uv-cache"))


def write_wheel(
    folder: Path,
    name: str,
    version: str,
    code: str,
    *,
    requires: Iterable[str] = (),
    others: Mapping[str, str] | None = None,
) -> None:
    """Write a wheel of the module `name`, and of `others`: file name -> text."""
    info = f"{name}-{version}.dist-info"
    files = {
        f"{name}.py": code.encode(),
        **{other: text.encode() for other, text in (others or {}).items()},
        f"{info}/METADATA": "\n".join(
            [
                *("Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"),
                *(f"Requires-Dist: {each}" for each in requires),
            ]
        ).encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    _write(folder / f"{name}-{version}-py3-none-any.whl", info, files)


def repack(folder: Path, name: str) -> None:
    """Write the wheel of a package that is installed here."""
    installed = importlib.metadata.distribution(name)
    (info,) = {file.parts[0] for file in installed.files or () if file.parts[0].endswith(".dist-info")}
    tag = next(line[5:] for line in (installed.read_text("WHEEL") or "").splitlines() if line.startswith("Tag: "))
    files = {
        file.as_posix(): Path(str(file.locate())).read_bytes()
        for file in installed.files or ()
        if not {"..", "__pycache__", "RECORD", "INSTALLER", "REQUESTED"}.intersection(file.parts)
    }
    _write(folder / f"{info.removesuffix('.dist-info')}-{tag}.whl", info, files)


def _write(path: Path, info: str, files: dict[str, bytes]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    record = "".join(f"{name},sha256={_digest(data)},{len(data)}\n" for name, data in files.items())
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in {**files, f"{info}/RECORD": f"{record}{info}/RECORD,,\n".encode()}.items():
            archive.writestr(name, data)


def _digest(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
