"""Asyncio client of this node's Docker daemon. Only this module talks to Docker.

docker-py blocks, so each request runs in its own thread. Threads that still run do not delay the end of the process.
Errors are raised as PlatformError, with the action and the daemon's explanation.
"""

from __future__ import annotations

import asyncio
import io
import tarfile
import threading
from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import Any, TypeVar

import docker
import docker.errors
import urllib3.exceptions

from gpufn.call.threads import in_thread
from gpufn_core.errors import PlatformError
from gpufn_runtime.agent.cache.image_build_output import BuildOutput
from gpufn_runtime.agent.cache.image_recipe import Recipe
from gpufn_runtime.agent.launchers.base import ContainerEnd, ContainerGone, DaemonUnavailable
from gpufn_runtime.agent.launchers.containers.sandbox import Sandbox

DEFAULT_HOST = "unix:///var/run/docker.sock"

_TIMEOUT_S = 60.0
_WAIT_TIMEOUT_S = 5.0  # until the daemon reports an end that we have seen; our caller's own timeout is a little longer
_TAIL_LINES = 40
_NO_GPU_RUNTIME = "could not select device driver"

_T = TypeVar("_T")


class Docker:
    """`host` as in DOCKER_HOST. Connects on first use."""

    def __init__(self, host: str = DEFAULT_HOST, *, build_network: str = "") -> None:
        self._host = host
        self._build_network = build_network
        self._client: docker.APIClient | None = None
        self._connect_lock = threading.Lock()

    # --- containers ---------------------------------------------------------------------------------------------------

    async def create(self, name: str, image: str, sandbox: Sandbox, labels: Mapping[str, str]) -> str:
        """Create a container without starting it and return its id. Raises PlatformError."""

        def create(api: docker.APIClient) -> str:
            host_config = api.create_host_config(**sandbox.host_config)
            response = api.create_container(
                image, name=name, host_config=host_config, labels=dict(labels), **sandbox.container_config
            )
            return str(response["Id"])

        return await self._request(f"create a container of {image}", create)

    async def start(self, container: str) -> int:
        """Start a container and return the host pid of its first process. Raises PlatformError."""

        def start(api: docker.APIClient) -> int:
            api.start(container)
            return int(api.inspect_container(container)["State"]["Pid"])

        return await self._request(f"start container {container[:12]}", start)

    async def pause(self, container: str) -> None:
        await self._request(f"pause container {container[:12]}", lambda api: api.pause(container))

    async def unpause(self, container: str) -> None:
        await self._request(f"unpause container {container[:12]}", lambda api: api.unpause(container))

    async def end_of(self, container: str) -> ContainerEnd:
        """Return how a container ended whose first process has ended. Raises PlatformError."""

        def inspect(api: docker.APIClient) -> ContainerEnd:
            api.wait(container, timeout=_WAIT_TIMEOUT_S)
            info = api.inspect_container(container)
            exceeded_bytes = int(info["HostConfig"]["Memory"]) if info["State"]["OOMKilled"] else None
            return ContainerEnd.of(int(info["State"]["ExitCode"]), exceeded_bytes=exceeded_bytes)

        return await self._request(f"read the exit status of container {container[:12]}", inspect)

    async def output_of(self, container: str) -> str:
        """Return the last lines that the container wrote before it had a worker. Raises PlatformError."""

        def read(api: docker.APIClient) -> str:
            text: bytes = api.logs(container, tail=_TAIL_LINES)
            return text.decode("utf-8", "replace").strip()

        return await self._request(f"read the output of container {container[:12]}", read)

    async def remove(self, container: str) -> None:
        """Kill the container and remove it with its volumes. An absent container is fine. Raises PlatformError."""

        def remove(api: docker.APIClient) -> None:
            try:
                api.remove_container(container, force=True, v=True)
            except docker.errors.NotFound:
                pass
            except docker.errors.APIError as error:
                if error.status_code != HTTPStatus.CONFLICT:  # a removal is already in progress
                    raise

        await self._request(f"remove container {container[:12]}", remove)

    async def containers(self, labels: Mapping[str, str]) -> set[str]:
        """Return the ids of all containers that have these labels, in any state. Raises PlatformError."""
        wanted = [f"{name}={value}" for name, value in labels.items()]

        def find(api: docker.APIClient) -> set[str]:
            return {str(info["Id"]) for info in api.containers(all=True, filters={"label": wanted})}

        return await self._request("list containers", find)

    async def info(self) -> dict[str, Any]:
        """Return the daemon's SystemInfo. Raises PlatformError."""

        def read(api: docker.APIClient) -> dict[str, Any]:
            return dict(api.info())

        return await self._request("read its configuration", read)

    async def ensure_network(self, name: str, options: Mapping[str, str], labels: Mapping[str, str]) -> None:
        """Create a bridge network if it is absent. Raises PlatformError."""

        def ensure(api: docker.APIClient) -> None:
            if not any(network["Name"] == name for network in api.networks(names=[name])):
                api.create_network(name, driver="bridge", options=dict(options), labels=dict(labels))

        await self._request(f"create the network {name}", ensure)

    async def remove_network(self, name: str) -> bool:
        """Remove a network. Returns False if containers still use it. Raises PlatformError."""

        def remove(api: docker.APIClient) -> bool:
            try:
                api.remove_network(name)
            except docker.errors.NotFound:
                pass
            except docker.errors.APIError:
                return False
            return True

        return await self._request(f"remove the network {name}", remove)

    # --- images -------------------------------------------------------------------------------------------------------

    async def has_image(self, tag: str) -> bool:
        def inspect(api: docker.APIClient) -> bool:
            try:
                api.inspect_image(tag)
            except docker.errors.ImageNotFound:
                return False
            return True

        return await self._request(f"look for image {tag}", inspect)

    async def build(
        self,
        recipe: Recipe,
        files: Mapping[str, bytes],
        tag: str,
        labels: Mapping[str, str],
        on_line: Callable[[str], None],
    ) -> None:
        """Build an image. `on_line` receives each line of output. Raises BuildFailed with the reason."""
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
                    loop.call_soon_threadsafe(on_line, line)
                if "error" in part:
                    raise output.failure(str(part["error"]))

        await self._request(f"build image {tag}", build)

    async def images(self, label: str) -> set[str]:
        """Return the tags of the images that have this label. Raises PlatformError."""

        def find(api: docker.APIClient) -> set[str]:
            return {tag for info in api.images(filters={"label": label}) for tag in info.get("RepoTags") or ()}

        return await self._request("list images", find)

    async def remove_image(self, tag: str) -> bool:
        """Remove an image. Returns False if a container still uses it. An absent image is fine. Raises
        PlatformError."""

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

        return await self._request(f"remove image {tag}", remove)

    async def _request(self, action: str, request: Callable[[docker.APIClient], _T]) -> _T:
        try:
            return await in_thread(self._run, request)
        except docker.errors.NotFound as error:
            raise ContainerGone(f"Docker cannot {action}: {_explanation(error)}") from error
        except docker.errors.APIError as error:
            if _NO_GPU_RUNTIME in _explanation(error):
                hint = "Install nvidia-container-toolkit there."
                raise PlatformError(f"Docker at {self._host} has no GPU runtime. {hint}") from error
            raise PlatformError(f"Docker cannot {action}: {_explanation(error)}") from error
        except (docker.errors.DockerException, urllib3.exceptions.HTTPError, OSError) as error:
            raise DaemonUnavailable(f"Docker at {self._host} does not answer, so this node cannot {action}.") from error

    def _run(self, request: Callable[[docker.APIClient], _T]) -> _T:
        with self._connect_lock:
            if self._client is None:
                # Use neither DOCKER_HOST of the agent's environment nor the Docker CLI's context.
                self._client = docker.APIClient(self._host, version="auto", timeout=_TIMEOUT_S)
        return request(self._client)


def _explanation(error: docker.errors.APIError) -> str:
    return str(error.explanation or error).strip().rstrip(".") + "."


def _context(recipe: Recipe, files: Mapping[str, bytes]) -> io.BytesIO:
    """Return the build context as a tar file. File times are zero, so that Docker's build cache finds equal files."""
    buffer = io.BytesIO()
    members = {"Dockerfile": recipe.text.encode()} | {f"files/{digest}": files[digest] for digest in recipe.files}
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size, info.mode = len(data), 0o644
            archive.addfile(info, io.BytesIO(data))
    buffer.seek(0)
    return buffer
