"""The files of weights in a repository of the Hugging Face Hub, or in an S3 bucket, as they are at deploy."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple
from urllib.parse import urljoin
from xml.etree import ElementTree

import httpx
import msgspec

from gpufn_core.errors import ArtifactUnavailable, GpufnError, InvalidSpec
from gpufn_core.spec.weights_spec import HUB, Source, WeightsFile, check_count
from gpufn_core.weights.hub import Hub
from gpufn_core.weights.s3 import Bucket

_TIMEOUT_S = 30.0
_LARGEST_HASHED_HERE = 64 << 20  # a hub stores larger files with their sha256


class Listed(NamedTuple):
    """A file as its origin lists it. `has_sha256`: the origin knows the sha256, but does not list it."""

    path: str
    size: int
    digest: str = ""
    etag: str = ""
    has_sha256: bool = False


class Found(NamedTuple):
    """The files of a source. With `is_file`, the source is the one file."""

    files: list[Listed]
    is_file: bool
    commit: str = ""


class _HubFile(msgspec.Struct):
    type: str
    path: str
    size: int = 0
    lfs: dict[str, Any] | None = None


def hub_files(source: Source) -> Found:
    """List the files of a repository. Raises InvalidSpec and ArtifactUnavailable."""
    hub = Hub.from_env(os.environ)
    with _client(source) as client:
        about = _get(client, hub.revision_url(source.place, source.revision), hub.headers, _named(source))
        commit = _decode(about.content, dict[str, Any], source).get("sha", "")
        url, listed = hub.tree_url(source.place, commit), []
        while url:
            page = _get(client, url, hub.headers if hub.has(url) else {}, _named(source))
            listed += _decode(page.content, list[_HubFile], source)
            following = page.links.get("next", {}).get("url", "")
            url = following and urljoin(url, following)
    files = [
        Listed(file.path, file.size, str((file.lfs or {}).get("oid", ""))) for file in listed if file.type == "file"
    ]
    return _below(source, files, commit=commit)


def s3_files(source: Source) -> Found:
    """List the objects of a folder in a bucket. Raises InvalidSpec and ArtifactUnavailable."""
    bucket = Bucket.from_env(source.place, os.environ)
    files: list[Listed] = []
    with _client(source) as client:
        continuation: str | None = ""
        while continuation is not None:
            url = bucket.list_url(source.path, continuation)
            answer = _get(client, url, bucket.sign("GET", url, time.time()), _named(source))
            try:
                page = ElementTree.fromstring(answer.content)  # noqa: S314  the deployer's own store
            except ElementTree.ParseError as error:
                raise ArtifactUnavailable(f"{_named(source)}: its list of objects is not XML: {error}") from error
            files += map(_object, page.iterfind("{*}Contents"))
            continuation = page.findtext("{*}NextContinuationToken")
    return _below(source, [file for file in files if not file.path.endswith("/")])  # such objects represent folders


def _object(entry: ElementTree.Element) -> Listed:
    return Listed(
        entry.findtext("{*}Key") or "",
        int(entry.findtext("{*}Size") or 0),
        etag=entry.findtext("{*}ETag") or "",
        has_sha256=entry.findtext("{*}ChecksumAlgorithm") == "SHA256",
    )


def add_digests(source: Source, found: Found, files: Sequence[Listed]) -> list[WeightsFile]:
    """Return the selected files with all digests that can be found without reading large files."""
    check_count(_named(source), len(files))  # the spec's own check would come after as many requests
    with _client(source) as client:
        find = _hub_digest if source.scheme == HUB else _s3_digest
        return [
            WeightsFile(file.path, file.size, file.digest) if file.digest else find(client, source, found, file)
            for file in files
        ]


def _hub_digest(client: httpx.Client, source: Source, found: Found, file: Listed) -> WeightsFile:
    """Read a small file, which the hub lists without a sha256."""
    if file.size > _LARGEST_HASHED_HERE:
        raise InvalidSpec(f"{_named(source)}: the hub has no sha256 of {file.path}, which has {file.size:,} bytes")
    hub = Hub.from_env(os.environ)
    url = hub.file_url(source.place, found.commit, source.file_path(file.path, is_file=found.is_file))
    content = _get(client, url, hub.headers, _named(source)).content
    return WeightsFile(file.path, len(content), hashlib.sha256(content).hexdigest())


def _s3_digest(client: httpx.Client, source: Source, found: Found, file: Listed) -> WeightsFile:
    """Request the sha256 of an object that was uploaded with one. An upload in parts has a checksum of checksums."""
    without = WeightsFile(file.path, file.size, etag=file.etag)
    if not file.has_sha256:
        return without
    bucket = Bucket.from_env(source.place, os.environ)
    url = bucket.object_url(source.file_path(file.path, is_file=found.is_file))
    headers = bucket.sign("HEAD", url, time.time(), {"x-amz-checksum-mode": "ENABLED"})
    with _errors_of(_named(source)):
        answer = client.head(url, headers=headers)
    checksum = answer.headers.get("x-amz-checksum-sha256", "") if answer.status_code == 200 else ""
    if not checksum or "-" in checksum:
        return without
    return WeightsFile(file.path, file.size, base64.b64decode(checksum).hex(), file.etag)


def _below(source: Source, files: Iterable[Listed], commit: str = "") -> Found:
    """Return the files below the source's path, by their path from there."""
    prefix = f"{source.path}/" if source.path else ""
    inside = [file._replace(path=file.path.removeprefix(prefix)) for file in files if file.path.startswith(prefix)]
    if not inside and (same := [file for file in files if file.path == source.path]):
        name = source.path.rpartition("/")[2]
        return Found([same[0]._replace(path=name)], is_file=True, commit=commit)
    if not inside:
        raise InvalidSpec(f"{_named(source)} has no file at {source.path!r}")
    return Found(inside, is_file=False, commit=commit)


def _named(source: Source) -> str:
    return f"{source.scheme}://{source.place}" + (f"@{source.revision}" if source.revision else "")


def _client(source: Source) -> httpx.Client:
    # A redirect of S3 would send the session token to another host.
    return httpx.Client(timeout=_TIMEOUT_S, follow_redirects=source.scheme == HUB)


def _get(client: httpx.Client, url: str, headers: dict[str, str], name: str) -> httpx.Response:
    with _errors_of(name):
        answer = client.get(url, headers=headers)
    if answer.status_code in (401, 403):
        raise InvalidSpec(
            f"{name}: {answer.url.host} refuses access ({answer.status_code}): set HF_TOKEN, or the keys of AWS, to "
            "credentials that may read it"
        )
    if answer.status_code == 404:
        raise InvalidSpec(f"{name}: {answer.url.host} does not have it (404): check the name and the revision")
    if answer.is_redirect:
        raise ArtifactUnavailable(
            f"{name}: {answer.url.host} redirects ({answer.status_code}): set AWS_REGION to the region of the bucket, "
            "or AWS_ENDPOINT_URL to the address of the store"
        )
    if answer.status_code != 200:
        raise ArtifactUnavailable(f"{name}: {answer.url.host} responded with {answer.status_code}: deploy again later")
    return answer


@contextlib.contextmanager
def _errors_of(name: str) -> Iterator[None]:
    try:
        yield
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise ArtifactUnavailable(f"{name} cannot be reached: {error or type(error).__name__}") from error


def _decode(data: bytes, kind: Any, source: Source) -> Any:
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, GpufnError) as error:
        raise ArtifactUnavailable(f"{_named(source)}: the response is not that of a hub: {error}") from error
