"""The images that this node's containers are made of: built once per recipe, however many ask; removed when unused.

Their tags carry our home's name and the recipe's digest, so what is there is known from the daemon alone.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from gpufn_core.errors import ArtifactUnavailable, PlatformError
from gpufn_core.spec.image_spec import FILES_FOLDER, ImageSpec
from gpufn_runtime.agent.cache.image_recipe import Recipe, recipe

log = logging.getLogger(__name__)

Say = Callable[[str], None]


class ImageDaemon(Protocol):
    async def has_image(self, tag: str) -> bool: ...
    async def build(
        self, recipe: Recipe, files: Mapping[str, bytes], tag: str, labels: Mapping[str, str], say: Say
    ) -> None: ...
    async def images(self, label: str) -> set[str]: ...
    async def remove_image(self, tag: str) -> bool: ...


class Images:
    """`name` tells our images from those of others; `bases` and `worker_needs` as in `recipe`."""

    def __init__(self, daemon: ImageDaemon, *, name: str, bases: str, worker_needs: Sequence[str]) -> None:
        self._daemon = daemon
        self._name = name
        self._bases = bases
        self._worker_needs = tuple(worker_needs)
        self._builds: dict[str, asyncio.Task[None]] = {}
        self._listeners: dict[str, list[Say]] = {}
        self._kept: set[str] = set()
        self._may_collect = False
        self._not_removed: set[str] = set()  # and it was said why
        self._there: set[str] = set()  # as far as is known: to ask takes a part of a start

    def tag(self, spec: ImageSpec) -> str:
        return f"{self._name}:{self._recipe(spec).digest[:24]}"

    async def find(self, spec: ImageSpec) -> str | None:
        """Its tag, if it is there. Raises PlatformError."""
        tag = self.tag(spec)
        return tag if tag not in self._builds and await self._has(tag) else None

    async def get(self, spec: ImageSpec, bundle: str, say: Say) -> str:
        """The tag of an image that is there, built if need be; `say` hears the build, `bundle` is the folder with the
        image's files. Raises BuildFailed, ArtifactUnavailable, PlatformError."""
        tag = self.tag(spec)
        self._kept.add(tag)
        task = self._builds.get(tag)
        if task is None:
            if tag in self._there or await self._has(tag):
                return tag
            task = self._builds.get(tag)
        if task is None:
            task = asyncio.create_task(self._build(spec, tag, bundle), name=f"image-{tag}")
            self._builds[tag] = task
            task.add_done_callback(lambda done: self._built(tag, done))
        if say not in (listeners := self._listeners.setdefault(tag, [])):
            listeners.append(say)
        await asyncio.shield(task)
        return tag

    def forget(self, tag: str) -> None:
        """It is not there any more."""
        self._there.discard(tag)

    def keep(self, specs: Iterable[ImageSpec]) -> None:
        """From now on `collect` removes all others of ours, but for those that are asked for from now on."""
        self._kept = {self.tag(spec) for spec in specs} | self._builds.keys()
        self._may_collect = True

    async def collect(self) -> None:
        """Remove what need not be kept, unless a container still uses it. A name that somebody else gave to an image of
        ours is theirs. One that cannot be removed is tried again the next time. Raises PlatformError."""
        if not self._may_collect:
            return
        ours = {tag for tag in await self._daemon.images(self._label) if tag.startswith(f"{self._name}:")}
        self._not_removed &= ours
        for tag in ours:
            if tag in self._kept:  # by now: the one before took its time
                continue
            self.forget(tag)
            try:
                if await self._daemon.remove_image(tag):
                    log.info("nothing that is deployed uses the image %s any more", tag)
            except PlatformError as error:
                if tag not in self._not_removed:
                    log.warning("image %s is not removed: %s", tag, error.message)
                    self._not_removed.add(tag)

    async def _has(self, tag: str) -> bool:
        is_there = await self._daemon.has_image(tag)
        (self._there.add if is_there else self._there.discard)(tag)
        return is_there

    @property
    def _label(self) -> str:
        return f"gpufn.images={self._name}"

    async def _build(self, spec: ImageSpec, tag: str, bundle: str) -> None:
        how = self._recipe(spec)
        files = await asyncio.to_thread(_read, how.files, Path(bundle) / FILES_FOLDER)
        log.info("image %s is being built", tag)
        label, _, value = self._label.partition("=")

        def say(line: str) -> None:
            for listener in self._listeners.get(tag, ()):
                listener(f"image: {line}")

        await self._daemon.build(how, files, tag, {label: value}, say)

    def _built(self, tag: str, task: asyncio.Task[None]) -> None:
        del self._builds[tag]
        self._listeners.pop(tag, None)
        if task.cancelled():
            return
        if (error := task.exception()) is None:
            log.info("image %s is there", tag)
        else:
            log.warning("image %s: %s", tag, error)

    def _recipe(self, spec: ImageSpec) -> Recipe:
        return recipe(spec, bases=self._bases, worker_needs=self._worker_needs)


def _read(digests: Iterable[str], folder: Path) -> dict[str, bytes]:
    try:
        return {digest: (folder / digest).read_bytes() for digest in digests}
    except OSError as error:
        raise ArtifactUnavailable(f"the bundle lacks a file of its image: {error.filename}") from error
