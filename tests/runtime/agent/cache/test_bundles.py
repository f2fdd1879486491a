from __future__ import annotations

import asyncio
import io
import shutil
import stat
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpufn_core.errors import ArtifactUnavailable, InvalidBundle
from gpufn_core.ids import Digest, digest_of
from gpufn_runtime.agent.cache.bundles import BundleCache, unpack


def archive(*names: str, mode: int = 0) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as made:
        for name in names:
            info = zipfile.ZipInfo(name)
            info.external_attr = mode << 16
            made.writestr(info, f"# {name}\n")
    return buffer.getvalue()


def test_a_bundle_is_unpacked_whole_and_read_only(tmp_path: Path) -> None:
    data = archive("app.py", "pkg/__init__.py", "pkg/deep/mod.py")
    unpack(data, digest_of(data), tmp_path)
    root = tmp_path / digest_of(data)
    assert sorted(str(path.relative_to(root)) for path in root.rglob("*.py")) == [
        "app.py",
        "pkg/__init__.py",
        "pkg/deep/mod.py",
    ]
    assert stat.S_IMODE((root / "app.py").stat().st_mode) == 0o444
    assert [path.name for path in tmp_path.iterdir()] == [root.name]


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (archive("/etc/passwd"), "absolute path"),
        (archive("../up.py"), "leaves it"),
        (archive("a/../../up.py"), "leaves it"),
        (archive("a\\b.py"), "unusable name"),
        (archive("a.py", "A.py"), "twice"),
        (archive("link", mode=stat.S_IFLNK | 0o777), "a link or a device"),
        (archive("fifo", mode=stat.S_IFIFO | 0o600), "a link or a device"),
        (archive(*map(str, range(10_001))), "more than 10,000 entries"),
        (b"not a zip", "not a zip archive"),
    ],
)
def test_an_archive_that_is_not_to_be_trusted_leaves_nothing(data: bytes, why: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidBundle, match=why):
        unpack(data, digest_of(data), tmp_path)
    assert list(tmp_path.parent.glob("up.py")) == []
    assert list(tmp_path.iterdir()) == []


def test_a_name_twice_is_refused(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="Duplicate"):
        data = archive("a.py", "a.py")
    with pytest.raises(InvalidBundle, match="twice"):
        unpack(data, digest_of(data), tmp_path)


def test_a_file_that_is_a_folder_as_well_is_refused(tmp_path: Path) -> None:
    data = archive("a", "a/b.py")
    with pytest.raises(InvalidBundle, match=r"'a' .*file .*folder"):
        unpack(data, digest_of(data), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_reported_in_one_line(tmp_path: Path, monkeypatch: Any) -> None:
    def full(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    data = archive("app.py")
    with pytest.raises(ArtifactUnavailable, match="disk is full"):
        unpack(data, digest_of(data), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_bundle_missing_from_the_store_is_reported_with_a_remedy(tmp_path: Path) -> None:
    async def fetch(_digest: Digest) -> bytes:
        raise ArtifactUnavailable("gpufn_bundles has no abc.")

    with pytest.raises(ArtifactUnavailable, match=r"\(gpufn_bundles has no abc\)\. Deploy "):
        asyncio.run(BundleCache(tmp_path, fetch).get(Digest("abc")))


def test_concurrent_requests_cost_one_fetch_and_a_failure_is_retried(tmp_path: Path) -> None:
    data = archive("app.py")
    digest = digest_of(data)
    answers: list[bytes] = [b"damaged", data]

    async def fetch(_digest: Digest) -> bytes:
        return answers.pop(0)

    async def run() -> None:
        cache = BundleCache(tmp_path / "bundles", fetch)
        failed = await asyncio.gather(*[cache.get(digest) for _ in range(5)], return_exceptions=True)
        assert [type(error).__name__ for error in failed] == ["ArtifactUnavailable"] * 5
        paths = await asyncio.gather(*[cache.get(digest) for _ in range(5)])
        assert {path.name for path in paths} == {digest}
        assert answers == []
        assert BundleCache(tmp_path / "bundles", fetch).find(digest) == paths[0]

    asyncio.run(run())


@pytest.mark.parametrize("is_doubted_twice", [False, True])
@pytest.mark.parametrize(
    ("damage", "fetches"),
    [
        (shutil.rmtree, 1),
        (lambda path: (path / "pkg" / "mod.py").unlink(), 1),
        (lambda path: _overwrite(path / "app.py", "# pp.pya\n"), 1),
        (lambda path: (path / "written.txt").write_text("x"), 0),
    ],
    ids=["folder", "file", "content", "nothing"],
)
def test_changes_of_a_function_to_its_bundle_are_repaired_once_it_is_in_doubt(
    tmp_path: Path, damage: Callable[[Path], None], fetches: int, is_doubted_twice: bool
) -> None:
    data = archive("app.py", "pkg/mod.py")
    digest = digest_of(data)
    fetched: list[Digest] = []

    async def fetch(digest: Digest) -> bytes:
        fetched.append(digest)
        return data

    async def run() -> None:
        bundles = BundleCache(tmp_path / "bundles", fetch)
        path = await bundles.get(digest)
        fetched.clear()
        damage(path)
        for _ in range(1 + is_doubted_twice):
            bundles.recheck(digest)
            assert await bundles.get(digest) == path
        assert (path / "app.py").read_text() == "# app.py\n"
        assert (path / "pkg" / "mod.py").read_text() == "# pkg/mod.py\n"
        assert len(fetched) == fetches
        assert [each.name for each in (tmp_path / "bundles").iterdir()] == [digest]

    asyncio.run(run())


def test_bundles_of_an_earlier_agent_are_compared_with_the_archive_once_in_doubt(tmp_path: Path) -> None:
    data = archive("app.py")
    digest = digest_of(data)
    unpack(data, digest, tmp_path)
    (tmp_path / digest / "app.py").unlink()

    async def fetch(_: Digest) -> bytes:
        return data

    async def run() -> None:
        bundles = BundleCache(tmp_path, fetch)
        assert (await bundles.get(digest) / "app.py").exists() is False
        bundles.recheck(digest)
        assert (await bundles.get(digest) / "app.py").exists()

    asyncio.run(run())


def _overwrite(path: Path, text: str) -> None:
    path.chmod(0o644)
    path.write_text(text)


@pytest.mark.parametrize("is_of_earlier_agent", [False, True])
def test_byte_code_that_the_agent_has_not_written_is_removed_once_its_bundle_is_in_doubt(
    tmp_path: Path, is_of_earlier_agent: bool
) -> None:
    data = archive("app.py", "pkg/mod.py", "pkg/__pycache__/mod.cpython-311.pyc")

    async def fetch(_: Digest) -> bytes:
        return data

    async def run() -> None:
        bundles = BundleCache(tmp_path, fetch)
        digest = digest_of(data)
        path = await bundles.get(digest)
        bytecode = bundles.bytecode(digest)
        assert bytecode is not None
        bytecode.add("app.py", "3.11", b"code")
        if is_of_earlier_agent:
            bundles = BundleCache(tmp_path, fetch)
        bundles.recheck(digest)
        assert bundles.bytecode(digest) is None  # nothing is compiled from a bundle in doubt
        await bundles.get(digest)
        archived, added = (path / folder / "__pycache__" for folder in ("pkg", ""))
        assert [each.name for each in added.glob("*")] == [] if is_of_earlier_agent else ["app.cpython-311.pyc"]
        (added / "app.cpython-311.pyc").unlink(missing_ok=True)
        (added / "app.cpython-311.pyc").write_bytes(b"other")
        bundles.recheck(digest)
        await bundles.get(digest)
        assert [each.name for each in added.iterdir()] == []
        assert [each.name for each in archived.iterdir()] == ["mod.cpython-311.pyc"]
        assert (bundles.bytecode(digest) is bytecode) is False  # so that it is compiled again

    asyncio.run(run())


def test_a_bundle_that_is_unpacked_again_has_no_byte_code(tmp_path: Path) -> None:
    data = archive("app.py")

    async def fetch(_: Digest) -> bytes:
        return data

    async def run() -> None:
        bundles = BundleCache(tmp_path, fetch)
        digest = digest_of(data)
        await bundles.get(digest)
        before = bundles.bytecode(digest)
        assert before is not None
        before.versions.add("3.11")
        await bundles.keep(())
        assert bundles.bytecode(digest) is None
        with pytest.raises(FileNotFoundError):
            before.add("app.py", "3.11", b"code")  # the compiler was still at work
        await bundles.get(digest)
        after = bundles.bytecode(digest)
        assert after is not None
        assert after.versions == set()

    asyncio.run(run())


def test_a_bundle_that_is_repaired_is_compiled_again(tmp_path: Path) -> None:
    data = archive("app.py")

    async def fetch(_: Digest) -> bytes:
        return data

    async def run() -> None:
        bundles = BundleCache(tmp_path, fetch)
        digest = digest_of(data)
        path = await bundles.get(digest)
        before = bundles.bytecode(digest)
        assert before is not None
        before.versions.add("3.11")
        before.add("app.py", "3.11", b"code")
        _overwrite(path / "app.py", "changed")
        bundles.recheck(digest)
        await bundles.get(digest)
        after = bundles.bytecode(digest)
        assert after is not None
        assert (after.versions, list(path.rglob("*.pyc"))) == (set(), [])

    asyncio.run(run())
