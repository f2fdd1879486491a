"""Fetches of one file of weights: from the platform's store, from a Hugging Face Hub or from S3.

HTTP runs in threads of its own, one file per thread. A transfer that breaks off is resumed where it stopped. The
credentials are the node's (`gpufn_core.weights`); the spec names no address, so that a deploy cannot send them
elsewhere.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final

from gpufn_core.errors import ArtifactUnavailable
from gpufn_core.spec.file_tree import FileTree, TreeFile
from gpufn_core.spec.volume_spec import VolumeTree
from gpufn_core.spec.weights_spec import HUB, LOCAL, WeightsFile, WeightsSpec, parse_source
from gpufn_core.weights.hub import Hub
from gpufn_core.weights.s3 import Bucket
from gpufn_platform.process.clock import Clock
from gpufn_runtime.agent.cache.weights_disk import PartFile

if TYPE_CHECKING:
    import httpx

_THREADS: Final = 64  # four for each of 16 fetches
_STALLED_S: Final = 10.0
_RETRY_DELAYS_S: Final = (0.5, 2.0, 5.0, 10.0)  # after failures without progress in between
_ADVICE: Final = {
    401: "set HF_TOKEN of the agent to a token that may read it",
    403: "set the credentials of the agent (HF_TOKEN, or the keys of AWS) to some that may read it",
    404: "it was removed since the deploy: deploy again",
    416: "it is shorter than at the deploy: deploy again",
    412: "it was changed since the deploy: deploy again",
}


class _Stopped(Exception):
    """The fetch was cancelled."""


class _Stop:
    """The request of the event loop to end a transfer. A read that waits for the origin ends as well."""

    def __init__(self) -> None:
        self._is_requested = threading.Event()
        self._socket: socket.socket | None = None

    def request(self) -> None:
        self._is_requested.set()
        if (connection := self._socket) is not None:
            with contextlib.suppress(OSError):  # it is closed already
                socket.socket.shutdown(connection, socket.SHUT_RDWR)  # also of TLS, whose own method is not for threads

    def check(self, wait_s: float = 0.0) -> None:
        """Raise _Stopped if the end is requested within `wait_s`."""
        if self._is_requested.wait(wait_s):
            raise _Stopped

    @contextlib.contextmanager
    def ends(self, answer: httpx.Response) -> Iterator[None]:
        """Let a request end the connection of `answer`."""
        self._socket = answer.extensions["network_stream"].get_extra_info("socket")
        try:
            self.check()  # a request that came before there was a socket
            yield
        finally:
            self._socket = None


async def to_end(work: Awaitable[None], stop: Callable[[], None] = lambda: None) -> None:
    """Await the work of a thread. If cancelled, call `stop` and wait until the thread no longer uses its file."""
    thread = asyncio.ensure_future(work)
    try:
        await asyncio.shield(thread)
    except asyncio.CancelledError:
        stop()
        with contextlib.suppress(Exception):
            await thread
        raise


class _Retryable(Exception):
    """The store is away, slow or overloaded."""


ReadStore = Callable[[str], AsyncGenerator[bytes, None]]


class WeightsFetch:
    """`read_store` iterates over a file of the platform's store, by digest, and `read_volumes` over one of volumes.
    `environ` has the addresses and credentials
    of the origins."""

    def __init__(
        self,
        read_store: ReadStore,
        environ: Mapping[str, str],
        clock: Clock,
        retry_delays_s: tuple[float, ...] = _RETRY_DELAYS_S,
        read_volumes: ReadStore | None = None,
    ) -> None:
        self._read_store = read_store
        self._read_volumes = read_volumes or read_store
        self._environ = environ
        self._clock = clock
        self._retry_delays_s = retry_delays_s
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="weights")

    async def fetch(self, spec: FileTree, file: TreeFile, part: PartFile) -> None:
        """Write a file into `part`. Raises ArtifactUnavailable, BusUnavailable, WrongContent, OSError."""
        if isinstance(spec, VolumeTree):
            await _copy(self._read_volumes(file.digest), part)
            return
        assert isinstance(spec, WeightsSpec)
        assert isinstance(file, WeightsFile)
        if parse_source(spec.source).scheme == LOCAL:
            await _copy(self._read_store(file.digest), part)
            return
        stop = _Stop()
        work = asyncio.get_running_loop().run_in_executor(self._threads, self._download, spec, file, part, stop)
        await to_end(work, stop.request)

    def _download(self, spec: WeightsSpec, file: WeightsFile, part: PartFile, stop: _Stop) -> None:
        """Transfer a file, with retries. Runs in a thread."""
        import httpx  # noqa: PLC0415  (a fifth of an agent's start)

        stop.check()  # before a thread was free
        part.resume()
        failures = 0
        # A hub redirects to its CDN. A redirect of S3 would send the session token to another host.
        follows = parse_source(spec.source).scheme == HUB
        with httpx.Client(timeout=_STALLED_S, follow_redirects=follows) as client:
            while part.done < file.size or not file.size:
                before = part.done
                try:
                    self._transfer(client, spec, file, part, stop)
                    return
                except (_Retryable, httpx.HTTPError, httpx.InvalidURL) as error:
                    failures = failures + 1 if part.done == before else 1
                    if failures > len(self._retry_delays_s):
                        raise ArtifactUnavailable(
                            f"{spec.source}: {file.path} cannot be fetched: {error or type(error).__name__}. "
                            "The next start tries again."
                        ) from error
                stop.check(self._retry_delays_s[failures - 1])

    def _transfer(
        self, client: httpx.Client, spec: WeightsSpec, file: WeightsFile, part: PartFile, stop: _Stop
    ) -> None:
        url, headers = self._request(spec, file, part.done)
        with client.stream("GET", url, headers=headers) as answer, stop.ends(answer):
            _check_status(answer, spec, file)
            if part.done and not _continues(answer, part.done):
                part.restart()
            for chunk in answer.iter_raw():
                part.add(chunk)
                stop.check()
        if part.done < file.size:
            raise _Retryable(f"the response ended after {part.done:,} of {file.size:,} bytes")

    def _request(self, spec: WeightsSpec, file: WeightsFile, start: int) -> tuple[str, dict[str, str]]:
        """Return the URL and headers for the bytes from `start`."""
        source, path = parse_source(spec.source), spec.origin_path(file)
        headers = {"accept-encoding": "identity"} | ({"range": f"bytes={start}-"} if start else {})
        if source.scheme == HUB:
            hub = Hub.from_env(self._environ)
            return hub.file_url(source.place, spec.commit, path), hub.headers | headers
        bucket = Bucket.from_env(source.place, self._environ)
        url = bucket.object_url(path)
        condition = {"if-match": file.etag} if file.etag else {}
        return url, bucket.sign("GET", url, self._clock.time(), condition | headers)


async def _copy(chunks: AsyncGenerator[bytes, None], part: PartFile) -> None:
    part.restart()
    async with contextlib.aclosing(chunks) as source:
        async for chunk in source:
            await to_end(asyncio.to_thread(part.add, chunk))


def _check_status(answer: httpx.Response, spec: WeightsSpec, file: WeightsFile) -> None:
    status = answer.status_code
    if status in (200, 206):
        return
    if status in (408, 429) or status >= 500:
        raise _Retryable(f"{answer.url.host} responds with {status}")
    advice = _ADVICE.get(status, "check the address of the store in the agent's environment")
    raise ArtifactUnavailable(
        f"{spec.source}: {file.path} cannot be fetched: {answer.url.host} responds with {status}; {advice}."
    )


def _continues(answer: httpx.Response, start: int) -> bool:
    """Return whether the response has the rest of the file only."""
    return answer.status_code == 206 and answer.headers.get("content-range", "").startswith(f"bytes {start}-")
