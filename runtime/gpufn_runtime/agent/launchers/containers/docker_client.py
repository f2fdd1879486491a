"""The Docker daemon of this node, in coroutines. The one module that speaks to it.

docker-py blocks, so each request has a thread for as long as it lasts; one that still runs does not hold up the end of
our process. What goes wrong is a PlatformError that says what was asked and what the daemon answered.
"""

from __future__ import annotations

import asyncio
import io
import tarfile
import threading
from collections.abc import Callable, Iterable, Mapping
from http import HTTPStatus
from typing import TypeVar

import docker
import docker.errors
import requests
import urllib3.exceptions

from gpufn.call.threads import in_thread
from gpufn_core.errors import PlatformError
from gpufn_runtime.agent.cache.image_build_output import BuildOutput
from gpufn_runtime.agent.cache.image_recipe import Recipe
from gpufn_runtime.agent.launchers.base import ContainerEnd, ContainerGone, DaemonAway
from gpufn_runtime.agent.launchers.containers.sandbox import Sandbox

DEFAULT_HOST = "unix:///var/run/docker.sock"

_TIMEOUT_S = 60.0
_WAIT_TIMEOUT_S = 5.0  # for the daemon to learn of an end that we have seen; whoever asks waits a little longer
_TAIL_LINES = 40
_NO_GPU_RUNTIME = "could not select device driver"

_T = TypeVar("_T")


class Docker:
    """`host` as in DOCKER_HOST. Nothing is asked of the daemon before the first use."""

    def __init__(self, host: str = DEFAULT_HOST, *, build_network: str = "") -> None:
        self._host = host
        self._build_network = build_network
        self._client: docker.APIClient | None = None
        self._connecting = threading.Lock()

    # --- containers ---------------------------------------------------------------------------------------------------

    async def create(self, name: str, image: str, sandbox: Sandbox, labels: Mapping[str, str]) -> str:
        """The id of a container that does not run yet. Raises PlatformError."""

        def create(api: docker.APIClient) -> str:
            host_config = api.create_host_config(**sandbox.host_config)
            made = api.create_container(
                image, name=name, host_config=host_config, labels=dict(labels), **sandbox.container_config
            )
            return str(made["Id"])

        return await self._ask(f"make a container of {image}", create)

    async def start(self, container: str) -> int:
        """The pid, as this host sees it, of its first process. Raises PlatformError."""

        def start(api: docker.APIClient) -> int:
            api.start(container)
            return int(api.inspect_container(container)["State"]["Pid"])

        return await self._ask(f"start container {container[:12]}", start)

    async def pause(self, container: str) -> None:
        await self._ask(f"pause container {container[:12]}", lambda api: api.pause(container))

    async def unpause(self, container: str) -> None:
        await self._ask(f"go on with container {container[:12]}", lambda api: api.unpause(container))

    async def end_of(self, container: str) -> ContainerEnd:
        """How a container ended whose first process is gone. Raises PlatformError."""

        def inspect(api: docker.APIClient) -> ContainerEnd:
            api.wait(container, timeout=_WAIT_TIMEOUT_S)
            found = api.inspect_container(container)
            exceeded = int(found["HostConfig"]["Memory"]) if found["State"]["OOMKilled"] else None
            return ContainerEnd.of(int(found["State"]["ExitCode"]), exceeded_bytes=exceeded)

        return await self._ask(f"learn how container {container[:12]} ended", inspect)

    async def output_of(self, container: str) -> str:
        """The last lines that it wrote before it had a worker. Raises PlatformError."""

        def read(api: docker.APIClient) -> str:
            text: bytes = api.logs(container, tail=_TAIL_LINES)
            return text.decode("utf-8", "replace").strip()

        return await self._ask(f"read the output of container {container[:12]}", read)

    async def remove(self, container: str) -> None:
        """End it and all that is its. Absent is fine. Raises PlatformError."""

        def remove(api: docker.APIClient) -> None:
            try:
                api.remove_container(container, force=True, v=True)
            except docker.errors.NotFound:
                pass
            except docker.errors.APIError as error:
                if error.status_code != HTTPStatus.CONFLICT:  # somebody else is removing it
                    raise

        await self._ask(f"remove container {container[:12]}", remove)

    async def containers(self, labels: Mapping[str, str]) -> set[str]:
        """Ids of all that have these labels, in whatever state. Raises PlatformError."""
        wanted = [f"{name}={value}" for name, value in labels.items()]

        def find(api: docker.APIClient) -> set[str]:
            return {str(found["Id"]) for found in api.containers(all=True, filters={"label": wanted})}

        return await self._ask("list containers", find)

    # --- images -------------------------------------------------------------------------------------------------------

    async def has_image(self, tag: str) -> bool:
        def look(api: docker.APIClient) -> bool:
            try:
                api.inspect_image(tag)
            except docker.errors.ImageNotFound:
                return False
            return True

        return await self._ask(f"look for image {tag}", look)

    async def build(
        self,
        recipe: Recipe,
        files: Mapping[str, bytes],
        tag: str,
        labels: Mapping[str, str],
        say: Callable[[str], None],
    ) -> None:
        """Make an image; `say` hears each line of what it prints. Raises BuildFailed with the line that fails."""
        loop = asyncio.get_running_loop()
        context = _context(recipe, files)

        def build(api: docker.APIClient) -> None:
            output = BuildOutput()
            for part in api.build(
                fileobj=context,
                custom_context=True,
                tag=tag,
                labels=dict(labels),
                rm=True,
                forcerm=True,
                decode=True,
                network_mode=self._build_network or None,
            ):
                for line in output.lines(part):
                    loop.call_soon_threadsafe(say, line)
                if "error" in part:
                    raise output.failure(str(part["error"]))

        await self._ask(f"build image {tag}", build)

    async def images(self, label: str) -> set[str]:
        """Tags of the images that have this label. Raises PlatformError."""

        def find(api: docker.APIClient) -> set[str]:
            return {tag for found in api.images(filters={"label": label}) for tag in found.get("RepoTags") or ()}

        return await self._ask("list images", find)

    async def remove_image(self, tag: str) -> bool:
        """False when a container still uses it. Absent is fine. Raises PlatformError."""

        def remove(api: docker.APIClient) -> bool:
            try:
                api.remove_image(tag)
            except docker.errors.NotFound:
                pass
            except docker.errors.APIError as error:
                if error.status_code == HTTPStatus.CONFLICT:
                    return False
                raise
            return True

        return await self._ask(f"remove image {tag}", remove)

    async def _ask(self, what: str, request: Callable[[docker.APIClient], _T]) -> _T:
        try:
            return await in_thread(self._run, request)
        except docker.errors.NotFound as error:
            raise ContainerGone(f"Docker cannot {what}: {_said(error)}") from error
        except docker.errors.APIError as error:
            if _NO_GPU_RUNTIME in _said(error):
                raise PlatformError(
                    f"Docker at {self._host} has no runtime for GPUs: install nvidia-container-toolkit there."
                ) from error
            raise PlatformError(f"Docker cannot {what}: {_said(error)}") from error
        except (
            docker.errors.DockerException,
            requests.RequestException,
            urllib3.exceptions.HTTPError,
            OSError,
        ) as error:
            raise DaemonAway(f"Docker at {self._host} does not answer, so this node cannot {what}.") from error

    def _run(self, request: Callable[[docker.APIClient], _T]) -> _T:
        with self._connecting:
            if self._client is None:
                # Not from the environment of whoever started us, nor from the context of its command line.
                self._client = docker.APIClient(self._host, version="auto", timeout=_TIMEOUT_S)
        return request(self._client)


def _said(error: docker.errors.APIError) -> str:
    return str(error.explanation or error).strip().rstrip(".") + "."


def _context(recipe: Recipe, files: Mapping[str, bytes]) -> io.BytesIO:
    """The build file and what it copies; times are zero, so that the same files are found in the builder's cache."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, data in _members(recipe, files):
            info = tarfile.TarInfo(name)
            info.size, info.mode = len(data), 0o644
            archive.addfile(info, io.BytesIO(data))
    buffer.seek(0)
    return buffer


def _members(recipe: Recipe, files: Mapping[str, bytes]) -> Iterable[tuple[str, bytes]]:
    yield "Dockerfile", recipe.text.encode()
    for digest in recipe.files:
        yield f"files/{digest}", files[digest]
