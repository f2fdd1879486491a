"""Rules for the contents of a bundle. Pure; reads the archive's directory and unpacks nothing.

The gateway checks a bundle at deploy, and each agent checks it again before unpacking, because an agent trusts no
archive. Both use these rules, so that an agent accepts every bundle that the gateway accepted. Unpacking never writes
more than the sizes that the directory claims, so limiting the claimed sizes is enough.
"""

from __future__ import annotations

import io
import itertools
import operator
import stat
import unicodedata
import zipfile
from collections.abc import Mapping
from typing import Final

from gpufn_core.errors import InvalidBundle
from gpufn_core.spec.units import format_bytes

MAX_ENTRIES: Final = 10_000
MAX_UNPACKED_BYTES: Final = 512 << 20
MAX_RATIO: Final = 100
_RATIO_FLOOR: Final = 1 << 20  # a smaller file of zeros is not a zip bomb
_MAX_NAME_BYTES: Final = 1024
_CENTRAL_ENTRY: Final = b"PK\x01\x02"
_ENCRYPTED: Final = 0x1
_METHODS: Final = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)


def open_bundle(data: bytes) -> zipfile.ZipFile:
    """Open a bundle. Raises InvalidBundle if it is not a zip archive or has too many entries."""
    # Counted first, because zipfile creates an object for each entry.
    if data.count(_CENTRAL_ENTRY) > MAX_ENTRIES:
        raise InvalidBundle(f"The bundle has more than {MAX_ENTRIES:,} entries.")
    try:
        return zipfile.ZipFile(io.BytesIO(data))
    except (zipfile.BadZipFile, NotImplementedError, ValueError, OSError, EOFError) as error:
        raise InvalidBundle(f"The bundle is not a zip archive: {error}.") from error


def checked_entries(archive: zipfile.ZipFile) -> list[zipfile.ZipInfo]:
    """Return every entry, including folders. The bundle of a function without code has none.

    Raises InvalidBundle for links and devices, for sizes above the limits, for a name that leaves the bundle or is both
    a file and a folder, and for two names that are the same file in some file system.
    """
    entries = archive.infolist()
    seen: dict[str, zipfile.ZipInfo] = {}
    for entry in entries:
        _check_entry(entry)
        path = _comparison_key(entry.filename)
        if path in seen:
            raise InvalidBundle(f"The bundle contains {entry.filename!r} twice.")
        seen[path] = entry
    _check_folders(seen)
    if sum(entry.file_size for entry in entries) > MAX_UNPACKED_BYTES:
        raise InvalidBundle(f"The bundle unpacks to more than {format_bytes(MAX_UNPACKED_BYTES)}.")
    return entries


def _comparison_key(name: str) -> str:
    r"""Return a key that is equal for names of one file where a file system ignores case or Unicode normalization.

    >>> _comparison_key("Cafe\u0301/") == _comparison_key("caf\u00e9")
    True
    """
    return unicodedata.normalize("NFC", unicodedata.normalize("NFD", name.rstrip("/")).casefold())


def _check_folders(entries: Mapping[str, zipfile.ZipInfo]) -> None:
    """Raise InvalidBundle for a file that is also a folder of another entry."""
    # No name contains a null character. As the separator, it sorts the contents of a folder right after its name.
    ordered = sorted(((path.replace("/", "\0"), entry) for path, entry in entries.items()), key=operator.itemgetter(0))
    for (path, entry), (following, _) in itertools.pairwise(ordered):
        if following.startswith(f"{path}\0") and not entry.is_dir():
            raise InvalidBundle(f"The bundle contains {entry.filename!r} as a file and as a folder.")


def _check_entry(entry: zipfile.ZipInfo) -> None:
    name = entry.orig_filename
    parts = name.rstrip("/").split("/")
    if not name.isprintable() or "\\" in name or len(name.encode(errors="replace")) > _MAX_NAME_BYTES:
        raise InvalidBundle(f"The bundle has an entry with an unusable name: {name[:100]!r}.")
    if name.startswith("/") or ":" in parts[0]:
        raise InvalidBundle(f"The bundle has an absolute path: {name!r}.")
    if any(part in ("", ".", "..") for part in parts):
        raise InvalidBundle(f"The bundle has a path that leaves it or is not plain: {name!r}.")
    kind = stat.S_IFMT(entry.external_attr >> 16)
    if kind not in (0, stat.S_IFREG, stat.S_IFDIR):
        raise InvalidBundle(f"The bundle may contain only files and folders; {name!r} is a link or a device.")
    if kind and (kind == stat.S_IFDIR) != name.endswith("/"):
        raise InvalidBundle(f"{name!r} is neither a plain file nor a plain folder: its name and its mode differ.")
    if entry.flag_bits & _ENCRYPTED or entry.compress_type not in _METHODS:
        raise InvalidBundle(f"{name!r} is encrypted, or compressed in a way that gpufn does not unpack.")
    if entry.file_size > _RATIO_FLOOR and entry.file_size > MAX_RATIO * max(entry.compress_size, 1):
        raise InvalidBundle(f"{name!r} unpacks to more than {MAX_RATIO} times its size.")
