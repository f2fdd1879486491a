"""Files of predictions: URLs in arguments become files, and files in results become data URLs."""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import enum
import io
import mimetypes
import pathlib
import shutil
import tempfile
import urllib.request
from collections.abc import Iterator
from typing import Any, Final
from urllib.parse import unquote_to_bytes, urlsplit

from gpufn.hosted import cog_module as cog
from gpufn_core.errors import InvalidInput

_TIMEOUT_S: Final = 60.0  # without data from the server of a file
_DEFAULT_TYPE: Final = "application/octet-stream"


@contextlib.contextmanager
def input_files(arguments: dict[str, Any], kinds: dict[str, type]) -> Iterator[dict[str, Any]]:
    """Yield the arguments with a file for each URL. `kinds` has cog.Path or cog.File for parameters that take files.
    The files are removed afterwards. Raises InvalidInput for a URL that cannot be read."""
    with contextlib.ExitStack() as stack:
        if kinds:
            folder = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="cog-")))

            def open_one(name: str, value: Any) -> Any:
                if isinstance(value, list):
                    return [open_one(name, item) for item in value]
                if not isinstance(value, str):
                    return value
                path = _fetch(name, value, folder)
                return path if kinds[name] is cog.Path else stack.enter_context(path.open("rb"))

            arguments = {name: open_one(name, value) if name in kinds else value for name, value in arguments.items()}
        yield arguments


def _fetch(name: str, url: str, folder: pathlib.Path) -> pathlib.Path:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https", "data"):
        raise InvalidInput(f"{name}: expected the URL of a file: https:, http: or data:", field=name)
    target = pathlib.Path(tempfile.mkdtemp(dir=folder))
    try:
        if parts.scheme == "data":
            head, _, data = url.partition(",")
            kind = head.removeprefix("data:").partition(";")[0]
            path = target / f"file{mimetypes.guess_extension(kind) or ''}"
            path.write_bytes(
                base64.b64decode(data, validate=True) if head.endswith(";base64") else unquote_to_bytes(data)
            )
        else:
            path = target / (pathlib.PurePosixPath(parts.path).name or "file")
            with urllib.request.urlopen(url, timeout=_TIMEOUT_S) as response, path.open("wb") as file:  # noqa: S310
                shutil.copyfileobj(response, file)
    except (OSError, ValueError) as error:
        raise InvalidInput(f"{name}: the file cannot be read: {error}", field=name) from None
    return cog.Path(path)


def output(value: Any) -> Any:
    """Return a result with a data URL for each file. A file in the system's temporary folder is removed."""
    if isinstance(value, dict):
        return {key: output(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [output(item) for item in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {each.name: output(getattr(value, each.name)) for each in dataclasses.fields(value)}
    if callable(dump := getattr(value, "model_dump", None)):  # of pydantic
        return output(dump())
    return _scalar(value)


def _scalar(value: Any) -> Any:
    if isinstance(value, pathlib.Path):
        url = data_url(value.read_bytes(), value.name)
        if value.resolve().is_relative_to(pathlib.Path(tempfile.gettempdir()).resolve()):
            value.unlink(missing_ok=True)
        return url
    if isinstance(value, io.IOBase):
        read: str | bytes = value.read()
        return data_url(read.encode() if isinstance(read, str) else read, str(getattr(value, "name", "")))
    return value.value if isinstance(value, enum.Enum) else value


def data_url(data: bytes, name: str) -> str:
    """
    >>> data_url(b"a", "a.txt")
    'data:text/plain;base64,YQ=='
    """
    kind = mimetypes.guess_type(name)[0] or _DEFAULT_TYPE
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"
