"""Fetches of one file of weights: from the platform's store, from a Hugging Face Hub or from S3.

HTTP runs in threads of its own: one file per thread, four files at a time. A transfer that breaks off is resumed where
it stopped. The credentials are the node's (`gpufn_core.weights`); the spec names no address, so that a deploy cannot
send them elsewhere.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncGenerator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import httpx

from gpufn_core.errors import ArtifactUnavailable
from gpufn_core.spec.weights_spec import HUB, LOCAL, WeightsFile, WeightsSpec, parse_source
from gpufn_core.weights.hub import Hub
from gpufn_core.weights.s3 import Bucket
from gpufn_platform.process.clock import Clock
from gpufn_runtime.agent.cache.weights_disk import PartFile

_AT_ONCE: Final = 4
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


class _Retryable(Exception):
    """The store is away, slow or overloaded."""


class WeightsFetch:
    """`read_store` iterates over a file of the platform's store, by digest. `environ` has the addresses and credentials
    of the origins."""

    def __init__(
        self,
        read_store: Callable[[str], AsyncGenerator[bytes, None]],
        environ: Mapping[str, str],
        clock: Clock,
        retry_delays_s: tuple[float, ...] = _RETRY_DELAYS_S,
    ) -> None:
        self._read_store = read_store
        self._environ = environ
        self._clock = clock
        self._retry_delays_s = retry_delays_s
        self._threads = ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="weights")

    async def fetch(self, spec: WeightsSpec, file: WeightsFile, part: PartFile) -> None:
        """Write a file into `part`. Raises ArtifactUnavailable, BusUnavailable, WrongContent, OSError."""
        if parse_source(spec.source).scheme == LOCAL:
            part.restart()
            async with contextlib.aclosing(self._read_store(file.digest)) as chunks:
                async for chunk in chunks:
                    await asyncio.to_thread(part.add, chunk)
            return
        stopped = threading.Event()
        work = asyncio.get_running_loop().run_in_executor(self._threads, self._download, spec, file, part, stopped)
        try:
            await asyncio.shield(work)
        except asyncio.CancelledError:
            stopped.set()
            with contextlib.suppress(Exception):
                await work  # the caller closes `part`
            raise

    def _download(self, spec: WeightsSpec, file: WeightsFile, part: PartFile, stopped: threading.Event) -> None:
        """Transfer a file, with retries. Runs in a thread."""
        if stopped.is_set():  # before a thread was free
            raise _Stopped
        part.resume()
        failures = 0
        with httpx.Client(timeout=_STALLED_S, follow_redirects=True) as client:
            while part.done < file.size or not file.size:
                before = part.done
                try:
                    self._transfer(client, spec, file, part, stopped)
                    return
                except (_Retryable, httpx.HTTPError, httpx.InvalidURL) as error:
                    failures = failures + 1 if part.done == before else 1
                    if failures > len(self._retry_delays_s):
                        raise ArtifactUnavailable(
                            f"{spec.source}: {file.path} cannot be fetched: {error or type(error).__name__}. "
                            "The next start tries again."
                        ) from error
                if stopped.wait(self._retry_delays_s[failures - 1]):
                    raise _Stopped

    def _transfer(
        self, client: httpx.Client, spec: WeightsSpec, file: WeightsFile, part: PartFile, stopped: threading.Event
    ) -> None:
        url, headers = self._request(spec, file, part.done)
        with client.stream("GET", url, headers=headers) as answer:
            _check_status(answer, spec, file)
            if part.done and not _continues(answer, part.done):
                part.restart()
            for chunk in answer.iter_raw():
                part.add(chunk)
                if stopped.is_set():
                    raise _Stopped
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
