"""Images: built once, kept while in use, with build logs for the functions."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any

import pytest

from gpufn_core.errors import ArtifactUnavailable, BuildFailed, PlatformError
from gpufn_core.ids import digest_of
from gpufn_core.spec.image_spec import FILES_FOLDER, ImageFile, ImageSpec
from gpufn_runtime.agent.cache.image_recipe import Recipe
from gpufn_runtime.agent.cache.images import Images

TORCH = ImageSpec(python="3.12", pip=("torch",))
NUMPY = ImageSpec(python="3.12", pip=("numpy",))


class Daemon:
    """Fake daemon. A build waits for `may_end`."""

    def __init__(self) -> None:
        self.tags: set[str] = set()
        self.in_use: set[str] = set()
        self.stuck: set[str] = set()
        self.builds: list[Mapping[str, bytes]] = []
        self.may_end = asyncio.Event()
        self.fails = False

    async def has_image(self, tag: str) -> bool:
        await asyncio.sleep(0)
        return tag in self.tags

    async def build(
        self,
        recipe: Recipe,
        files: Mapping[str, bytes],
        tag: str,
        labels: Mapping[str, str],
        say: Callable[[str], None],
    ) -> None:
        self.builds.append(files)
        say("Step 1/2")
        await self.may_end.wait()
        if self.fails:
            raise BuildFailed("no such package")
        self.tags.add(tag)

    async def images(self, label: str) -> set[str]:
        return set(self.tags)

    async def remove_image(self, tag: str) -> bool:
        if tag in self.stuck:
            raise PlatformError(f"Docker cannot remove image {tag}: device or resource busy.")
        if tag in self.in_use:
            return False
        self.tags.discard(tag)
        return True


def run(test: Callable[[Daemon, Images], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        daemon = Daemon()
        await test(daemon, Images(daemon, name="ours", bases="b:{python}", worker_needs=["msgspec==1"]))

    asyncio.run(main())


def silent(line: str) -> None:
    """Ignore the build log."""


def test_concurrent_requests_build_an_image_once_and_log_it_once() -> None:
    async def test(daemon: Daemon, images: Images) -> None:
        heard: list[str] = []
        asking = [asyncio.create_task(images.get(TORCH, "", heard.append)) for _ in range(3)]
        await asyncio.sleep(0.01)
        daemon.may_end.set()
        assert set(await asyncio.gather(*asking)) == {images.tag(TORCH)}
        assert (len(daemon.builds), heard) == (1, ["image: Step 1/2"])
        assert await images.get(TORCH, "", silent) == await images.find(TORCH) == images.tag(TORCH)
        assert len(daemon.builds) == 1

    run(test)


def test_a_failed_image_is_retried_by_the_next_request() -> None:
    async def test(daemon: Daemon, images: Images) -> None:
        daemon.may_end.set()
        daemon.fails = True
        with pytest.raises(BuildFailed):
            await images.get(TORCH, "", silent)
        assert await images.find(TORCH) is None
        daemon.fails = False
        assert await images.get(TORCH, "", silent) == images.tag(TORCH)

    run(test)


def test_a_cancelled_request_does_not_stop_the_build() -> None:
    async def test(daemon: Daemon, images: Images) -> None:
        asking = asyncio.create_task(images.get(TORCH, "", silent))
        await asyncio.sleep(0.01)
        asking.cancel()
        daemon.may_end.set()
        assert await images.get(TORCH, "", silent) == images.tag(TORCH)
        assert len(daemon.builds) == 1

    run(test)


def test_its_files_are_read_from_the_bundle(tmp_path: Path) -> None:
    digest = digest_of(b"x")
    spec = ImageSpec(python="3.12", files=(ImageFile("/opt/x", digest),))

    async def test(daemon: Daemon, images: Images) -> None:
        daemon.may_end.set()
        with pytest.raises(ArtifactUnavailable, match="lacks a file"):
            await images.get(spec, str(tmp_path), silent)
        (tmp_path / FILES_FOLDER).mkdir()
        (tmp_path / FILES_FOLDER / digest).write_bytes(b"y")
        with pytest.raises(ArtifactUnavailable, match="differs from its digest"):
            await images.get(spec, str(tmp_path), silent)
        (tmp_path / FILES_FOLDER / digest).write_bytes(b"x")
        await images.get(spec, str(tmp_path), silent)
        assert daemon.builds == [{digest: b"x"}]

    run(test)


def test_nothing_is_removed_before_the_kept_images_are_known() -> None:
    async def test(daemon: Daemon, images: Images) -> None:
        daemon.tags = {"ours:old"}
        await images.collect()
        assert daemon.tags == {"ours:old"}

    run(test)


def test_unneeded_images_are_removed_when_no_container_uses_them() -> None:
    async def test(daemon: Daemon, images: Images) -> None:
        daemon.may_end.set()
        torch = await images.get(TORCH, "", silent)
        daemon.tags |= {"ours:old", "ours:older"}
        daemon.in_use = {"ours:old"}
        images.keep([TORCH])
        await images.collect()
        assert daemon.tags == {torch, "ours:old"}
        daemon.in_use = set()
        await images.collect()
        assert daemon.tags == {torch}

    run(test)


def test_an_image_that_cannot_be_removed_blocks_no_other_and_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    async def test(daemon: Daemon, images: Images) -> None:
        daemon.tags = {"ours:1", "ours:2", "ours:3"}
        daemon.stuck = {"ours:2"}
        images.keep([])
        for _ in range(3):
            await images.collect()
        assert daemon.tags == {"ours:2"}
        [warning] = [record.message for record in caplog.records if record.levelname == "WARNING"]
        assert warning.startswith("cannot remove image ours:2: ")
        assert warning.endswith(": device or resource busy.")
        daemon.stuck = set()
        await images.collect()
        assert daemon.tags == set()

    run(test)


def test_images_requested_meanwhile_are_kept_as_well() -> None:
    async def test(daemon: Daemon, images: Images) -> None:
        daemon.may_end.set()
        images.keep([TORCH])
        numpy = await images.get(NUMPY, "", silent)
        await images.collect()
        assert daemon.tags == {numpy}

    run(test)


def test_images_requested_during_a_removal_are_kept() -> None:
    async def test(daemon: Daemon, images: Images) -> None:
        daemon.may_end.set()
        specs = {await images.get(spec, "", silent): spec for spec in (TORCH, NUMPY)}
        asked_for: set[str] = set()
        remove = daemon.remove_image

        async def remove_slowly(tag: str) -> bool:
            if not asked_for:
                asked_for.add(await images.get(specs[next(iter(specs.keys() - {tag}))], "", silent))
            return await remove(tag)

        daemon.remove_image = remove_slowly  # type: ignore[method-assign]
        images.keep([])
        await images.collect()
        assert daemon.tags == asked_for

    run(test)


def test_a_foreign_tag_of_our_image_stays_foreign() -> None:
    async def test(daemon: Daemon, images: Images) -> None:
        daemon.tags = {"ours:old", "theirs:kept", "ours-too:1"}
        images.keep([])
        await images.collect()
        assert daemon.tags == {"theirs:kept", "ours-too:1"}

    run(test)
