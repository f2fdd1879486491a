from __future__ import annotations

import io
import stat
import struct
import zipfile
from collections.abc import Iterable
from typing import Any

import pytest

from gpufn_core.domain.bundle_rules import MAX_ENTRIES
from gpufn_core.errors import InvalidBundle
from gpufn_core.ids import digest_of
from gpufn_gateway.functions.bundle_check import check_bundle


def zipped(entries: Iterable[tuple[str | zipfile.ZipInfo, bytes]], method: int = zipfile.ZIP_DEFLATED) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", method) as archive:
        for name, data in entries:
            archive.writestr(name, data)
    return buffer.getvalue()


def entry(name: str, mode: int) -> zipfile.ZipInfo:
    info = zipfile.ZipInfo(name)
    info.external_attr = mode << 16
    return info


def renamed(new: bytes) -> bytes:
    """Return an archive with an entry name that zipfile would not write."""
    return zipped([("x" * len(new), b"")]).replace(b"x" * len(new), new)


def claims(size: int) -> bytes:
    """Return an archive whose entry claims to unpack to `size` bytes."""
    data = bytearray(zipped([("a", b"\0" * 5_000_000)]))
    at = data.rindex(b"PK\x01\x02")
    data[at + 24 : at + 28] = struct.pack("<I", size)
    return bytes(data)


def check(data: bytes) -> None:
    check_bundle(data, digest_of(data))


def test_an_ordinary_bundle_is_accepted() -> None:
    check(zipped([("app.py", b"x = 1"), ("data/", b""), ("data/a.bin", bytes(1000)), ("..data.py", b"")]))
    check(zipped([(entry("run.sh", stat.S_IFREG | 0o755), b"#!/bin/sh")]))
    check(zipped([]))  # for a function without code
    check(zipped([("x/", b""), ("x/y.py", b""), ("x.py", b""), ("x-y", b""), (entry("z/", stat.S_IFDIR | 0o755), b"")]))


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "not a zip archive"),
        (b"PK\x03\x04" + bytes(50), "not a zip archive"),
        (zipped([("../x", b"")]), "leaves it"),
        (zipped([("a/../../x", b"")]), "leaves it"),
        (zipped([("a//b", b"")]), "not plain"),
        (zipped([("./a", b"")]), "not plain"),
        (zipped([("/etc/passwd", b"")]), "absolute path"),
        (zipped([("C:/x", b"")]), "absolute path"),
        (renamed(b"a\\..\\b"), "unusable name"),
        (renamed(b"a\0b.py"), "unusable name"),
        (renamed(b"a\nb.py"), "unusable name"),
        (zipped([("a" * 2000, b"")]), "unusable name"),
        (zipped([(entry("l", stat.S_IFLNK | 0o777), b"/etc/passwd")]), "link or a device"),
        (zipped([(entry("l", stat.S_IFCHR | 0o777), b"")]), "link or a device"),
        (zipped([(entry("l", stat.S_IFIFO | 0o777), b"")]), "link or a device"),
        (zipped([("a.py", b""), ("A.py", b"")]), "twice"),
        (zipped([("a", b""), ("a/", b"")]), "twice"),
        (zipped([("x", b""), ("x/y", b"")]), "'x' as a file and as a folder"),
        (zipped([("x/y/z.py", b""), ("x!", b""), ("x/y", b"")]), "'x/y' as a file and as a folder"),
        (zipped([("X", b""), ("x/y", b"")]), "'X' as a file and as a folder"),
        (zipped([("x", b""), ("x/y/", b"")]), "'x' as a file and as a folder"),
        (zipped([("caf\u00e9.py", b""), ("cafe\u0301.py", b"")]), "twice"),
        (zipped([("stra\u00dfe", b""), ("STRASSE", b"")]), "twice"),
        (zipped([(entry("x", stat.S_IFDIR | 0o755), b"")]), "neither a plain file nor a plain folder"),
        (zipped([(entry("x/", stat.S_IFREG | 0o644), b"")]), "neither a plain file nor a plain folder"),
        (zipped([("zeros", bytes(4 << 20))]), "100 times its size"),
        (claims(0xFFFFFFF0), "100 times its size"),
        (zipped([("a", b"x")], zipfile.ZIP_BZIP2), "does not unpack"),
    ],
)
def test_harmful_bundles_are_refused(data: bytes, reason: str) -> None:
    with pytest.raises(InvalidBundle, match=reason):
        check(data)


def test_there_are_not_too_many_entries() -> None:
    with pytest.raises(InvalidBundle, match="more than 10,000"):
        check(zipped([(str(number), b"") for number in range(MAX_ENTRIES + 1)], zipfile.ZIP_STORED))


def test_many_files_may_not_add_up_to_a_bomb(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpufn_core.domain.bundle_rules.MAX_UNPACKED_BYTES", 3 << 20)
    with pytest.raises(InvalidBundle, match="3 MiB"):
        check(zipped([(str(number), bytes(1 << 20)) for number in range(4)]))


def test_the_digest_must_be_that_of_the_bytes() -> None:
    with pytest.raises(InvalidBundle, match="damaged in transit"):
        check_bundle(zipped([("a", b"")]), "0" * 64)


def test_garbage_never_escapes_as_another_error() -> None:
    whole = zipped([("app.py", b"x = 1" * 20)])
    for position in range(len(whole)):
        for value in (0, 0xFF):
            data: Any = bytearray(whole)
            data[position] = value
            try:
                check(bytes(data))
            except InvalidBundle:
                continue
