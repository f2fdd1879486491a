"""Container images of this node: built once per recipe, however many callers need one; removed when unused.

A tag holds this home's name and the recipe's digest, so Docker alone shows which images exist.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from gpufn_core.errors import ArtifactUnavailable, PlatformError
from gpufn_core.ids import digest_of
from gpufn_core.spec.image_spec import FILES_FOLDER, ImageSpec
from gpufn_runtime.agent.cache.image_recipe import Recipe, recipe

log = logging.getLogger(__name__)

_LABEL = "gpufn.images"

OnLine = Callable[[str], None]


class ImageDaemon(Protocol):
    async def has_image(self, tag: str) -> bool: ...
    async def build(
        self, recipe: Recipe, files: Mapping[str, bytes], tag: str, labels: Mapping[str, str], on_line: OnLine
    ) -> None: ...
    async def images(self, label: str) -> set[str]: ...
    async def remove_image(self, tag: str) -> bool: ...


class Images:
    """Images of this home. `name` is the tag prefix of its images. See `recipe` for `bases` and `worker_needs`."""

    def __init__(self, daemon: ImageDaemon, *, name: str, bases: str, worker_needs: Sequence[str]) -> None:
        self._daemon = daemon
        self._name = name
        self._recipe = functools.partial(recipe, bases=bases, worker_needs=tuple(worker_needs))
        self._builds: dict[str, asyncio.Task[None]] = {}
        self._listeners: dict[str, list[OnLine]] = {}
        self._tags_in_use: set[str] = set()
        self._has_kept_specs = False
        self._failed_removals: set[str] = set()  # each was logged once
        self._known_tags: set[str] = set()  # images that existed when last checked; saves a request to Docker per start

    def tag(self, spec: ImageSpec) -> str:
        return f"{self._name}:{self._recipe(spec).digest[:24]}"

    async def find(self, spec: ImageSpec) -> str | None:
        """Return the image's tag if the image exists. Raises PlatformError."""
        tag = self.tag(spec)
        return tag if tag not in self._builds and await self._has(tag) else None

    async def get(self, spec: ImageSpec, bundle: str, on_line: OnLine) -> str:
        """Return the image's tag; build the image first if needed. `on_line` receives the build's log lines; `bundle`
        is the folder with the image's files. Raises BuildFailed, ArtifactUnavailable, PlatformError."""
        tag = self.tag(spec)
        self._tags_in_use.add(tag)
        if tag not in self._builds and (tag in self._known_tags or await self._has(tag)):
            return tag
        if (task := self._builds.get(tag)) is None:
            task = asyncio.create_task(self._build(spec, tag, bundle), name=f"image-{tag}")
            self._builds[tag] = task
            task.add_done_callback(lambda done: self._built(tag, done))
        if on_line not in (listeners := self._listeners.setdefault(tag, [])):
            listeners.append(on_line)
        await asyncio.shield(task)
        return tag

    def forget(self, tag: str) -> None:
        """Forget that the image exists: it was removed."""
        self._known_tags.discard(tag)

    def keep(self, specs: Iterable[ImageSpec]) -> None:
        """Let `collect` remove all other images of this home. Images that `get` returns from now on are kept too."""
        self._tags_in_use = {self.tag(spec) for spec in specs} | self._builds.keys()
        self._has_kept_specs = True

    async def collect(self) -> None:
        """Remove unused images, except those that a container still uses. Tags that other people added to our images
        are kept. A failed removal is retried on the next call. Raises PlatformError."""
        if not self._has_kept_specs:
            return
        ours = {tag for tag in await self._daemon.images(f"{_LABEL}={self._name}") if tag.startswith(f"{self._name}:")}
        self._failed_removals &= ours
        for tag in ours:
            if tag in self._tags_in_use:  # checked again: the previous removal took time
                continue
            self.forget(tag)
            try:
                if await self._daemon.remove_image(tag):
                    log.info("removed image %s: no deployed function uses it", tag)
            except PlatformError as error:
                if tag not in self._failed_removals:
                    log.warning("cannot remove image %s: %s", tag, error.message)
                    self._failed_removals.add(tag)

    async def _has(self, tag: str) -> bool:
        exists = await self._daemon.has_image(tag)
        (self._known_tags.add if exists else self._known_tags.discard)(tag)
        return exists

    async def _build(self, spec: ImageSpec, tag: str, bundle: str) -> None:
        build_recipe = self._recipe(spec)
        files = await asyncio.to_thread(_read, build_recipe.files, Path(bundle) / FILES_FOLDER)
        log.info("building image %s", tag)

        def on_line(line: str) -> None:
            for listener in self._listeners.get(tag, ()):
                listener(f"image: {line}")

        await self._daemon.build(build_recipe, files, tag, {_LABEL: self._name}, on_line)

    def _built(self, tag: str, task: asyncio.Task[None]) -> None:
        del self._builds[tag]
        self._listeners.pop(tag, None)
        if task.cancelled():
            return
        if (error := task.exception()) is None:
            log.info("image %s is ready", tag)
        else:
            log.warning("image %s failed to build: %s", tag, error)


def _read(digests: Iterable[str], folder: Path) -> dict[str, bytes]:
    try:
        files = {digest: (folder / digest).read_bytes() for digest in digests}
    except OSError as error:
        raise ArtifactUnavailable(f"The bundle lacks a file of its image: {error.filename}.") from error
    for digest, data in files.items():  # teams share the image that they make
        if digest_of(data) != digest:
            raise ArtifactUnavailable(f"A file in the bundle differs from its digest {digest[:12]}: deploy again.")
    return files
