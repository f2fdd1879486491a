"""Files of volumes in a bucket of an S3 store.

A file is the object PREFIX + sha256. The last part of an upload is sent only if the file has its sha256, so that no
other object gets the name. The sha256 is also signed, which most stores compare. A copy of an object onto itself renews
its age.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from typing import Final
from xml.etree import ElementTree

import httpx

from gpufn_core.errors import ArtifactUnavailable, InvalidInput
from gpufn_core.ids import digest_of, is_digest
from gpufn_core.weights.s3 import Bucket
from gpufn_platform.bus.storage.hashing import Sha256
from gpufn_platform.process.clock import Clock
from gpufn_platform.volume_store.store import StoredFile

_NO_BYTES: Final = digest_of(b"")
_TIMEOUT: Final = httpx.Timeout(30.0)
_RETRY_DELAYS_S: Final = (0.2, 1.0, 3.0)
_PART: Final = 1 << 20
_MAX_MESSAGE: Final = 200


class S3Store:
    """A `VolumeStore`."""

    def __init__(self, bucket: Bucket, prefix: str, clock: Clock) -> None:
        self._bucket = bucket
        self._prefix = prefix
        self._clock = clock
        self._client = httpx.AsyncClient(timeout=_TIMEOUT, trust_env=True)

    async def touch(self, digest: str) -> int | None:
        found = await self._request("HEAD", self._url(digest), accepts_absence=True)
        if found is None:
            return None
        size = int(found.headers["content-length"])
        if size == 0 and digest != _NO_BYTES:
            return None  # SeaweedFS 4.48 stores an empty object if the upload of a small one breaks off
        source = f"/{self._bucket.name}/{self._prefix}{digest}"
        headers = {"x-amz-copy-source": source, "x-amz-metadata-directive": "REPLACE"}
        if await self._request("PUT", self._url(digest), headers, accepts_absence=True) is None:
            return None
        return size

    async def put(self, data: bytes) -> str:
        digest = digest_of(data)
        if await self.touch(digest) is None:
            await self._request("PUT", self._url(digest), body_digest=digest, content=data)
        return digest

    async def put_stream(self, digest: str, size: int, parts: AsyncIterator[bytes]) -> None:
        checked = _Checked(parts, digest, size)
        try:
            await self._request("PUT", self._url(digest), body_digest=digest, content=checked.read(), size=size)
        except ArtifactUnavailable:
            if checked.is_refused:
                raise InvalidInput(f"the file {digest[:12]} is not {size:,} bytes with this sha256") from None
            raise

    async def get(self, digest: str) -> bytes:
        parts = [part async for part in self.read(digest)]
        return b"".join(parts)

    async def read(self, digest: str) -> AsyncGenerator[bytes, None]:
        url, sha256 = self._url(digest), Sha256()
        try:
            async with self._client.stream("GET", url, headers=self._signed("GET", url)) as response:
                if response.status_code != httpx.codes.OK:
                    await response.aread()
                    raise _failure(response, url)
                async for part in response.aiter_raw(_PART):
                    await sha256.add(part)
                    yield part
        except httpx.HTTPError as error:
            raise _unreachable(url, error) from error
        if await sha256.hexdigest() != digest:
            raise ArtifactUnavailable(f"The file {digest[:12]} is damaged in the store of volumes.")

    async def files(self) -> list[StoredFile]:
        found: list[StoredFile] = []
        continuation: str | None = ""
        while continuation is not None:
            response = await self._request("GET", self._bucket.list_url(self._prefix, continuation))
            assert response is not None
            try:
                page = ElementTree.fromstring(response.content)  # noqa: S314  the operator's own store
                found += filter(None, map(self._file, page.iterfind("{*}Contents")))
            except (ElementTree.ParseError, ValueError) as error:
                raise ArtifactUnavailable(f"The store of volumes lists its objects in another form: {error}") from error
            continuation = page.findtext("{*}NextContinuationToken")
        return found

    async def remove(self, file: StoredFile) -> bool:
        # A file that was touched since it was listed is stored again by its commit, which checks the files that it
        # names.
        url = self._url(file.digest)
        found = await self._request("HEAD", url, accepts_absence=True)
        if found is None or _modified_at(found.headers.get("last-modified", "")) > file.put_at:
            return False
        await self._request("DELETE", url)
        return True

    async def remove_unfinished(self, before: float) -> None:
        """Do nothing: an upload that broke off left no object."""

    async def aclose(self) -> None:
        await self._client.aclose()

    def _file(self, entry: ElementTree.Element) -> StoredFile | None:
        name = (entry.findtext("{*}Key") or "").removeprefix(self._prefix)
        if not is_digest(name):
            return None  # another program's
        put_at = datetime.datetime.fromisoformat(entry.findtext("{*}LastModified") or "").timestamp()
        return StoredFile(name, int(entry.findtext("{*}Size") or 0), put_at, None)

    def _url(self, digest: str) -> str:
        return self._bucket.object_url(f"{self._prefix}{digest}")

    def _signed(self, method: str, url: str, headers: Mapping[str, str] = {}, body_digest: str = "") -> dict[str, str]:
        return self._bucket.sign(method, url, self._clock.time(), headers, body_digest=body_digest)

    async def _request(
        self,
        method: str,
        url: str,
        headers: Mapping[str, str] = {},
        *,
        body_digest: str = "",
        content: bytes | AsyncIterator[bytes] | None = None,
        size: int | None = None,
        accepts_absence: bool = False,
    ) -> httpx.Response | None:
        """Return the response; None for an absent object if that is accepted. `size`: of a body that is sent in parts.
        Raises ArtifactUnavailable."""
        delays_s = iter(() if size is not None else _RETRY_DELAYS_S)  # parts cannot be sent again
        while True:
            sent = self._signed(method, url, headers, body_digest)
            if size is not None:
                sent["content-length"] = str(size)
            try:
                response = await self._client.request(method, url, headers=sent, content=content)
            except httpx.HTTPError as error:
                if (delay_s := next(delays_s, None)) is None:
                    raise _unreachable(url, error) from error
            else:
                if not response.is_server_error or (delay_s := next(delays_s, None)) is None:
                    break
            await asyncio.sleep(delay_s)
        if response.is_success:
            return response
        if accepts_absence and response.status_code == httpx.codes.NOT_FOUND:
            return None
        raise _failure(response, url)


class _Checked:
    """The parts of an upload, which end early if they are not the announced ones: the store then refuses the upload."""

    def __init__(self, parts: AsyncIterator[bytes], digest: str, size: int) -> None:
        self._parts = parts
        self._digest = digest
        self._size = size
        self.is_refused = False

    async def read(self) -> AsyncIterator[bytes]:
        sha256, sent = Sha256(), 0
        held = b""  # the last part is sent only if all of the file is right
        async for part in self._parts:
            sent += len(part)
            if sent > self._size:
                self.is_refused = True
                raise httpx.WriteError("the file is longer than announced")
            await sha256.add(part)
            if held:
                yield held
            held = bytes(part)
        if sent != self._size or await sha256.hexdigest() != self._digest:
            self.is_refused = True
            raise httpx.WriteError("the file is not the announced one")
        yield held


def _modified_at(text: str) -> float:
    with contextlib.suppress(ValueError):
        return datetime.datetime.strptime(text, "%a, %d %b %Y %H:%M:%S GMT").replace(tzinfo=datetime.UTC).timestamp()
    return 0.0


def _unreachable(url: str, error: Exception) -> ArtifactUnavailable:
    place = httpx.URL(url).host
    return ArtifactUnavailable(f"The store of volumes at {place} does not respond: {error or type(error).__name__}.")


def _failure(response: httpx.Response, url: str) -> ArtifactUnavailable:
    if response.status_code == httpx.codes.NOT_FOUND:
        return ArtifactUnavailable(f"The store of volumes has no object {httpx.URL(url).path[-80:]}.")
    advice = ": check the variables of AWS on this machine" if response.status_code in (401, 403) else ""
    text = response.text[:_MAX_MESSAGE].replace("\n", " ") if response.content else ""
    return ArtifactUnavailable(f"The store of volumes refuses a request with {response.status_code}{advice}. {text}")
