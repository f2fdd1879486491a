"""Model endpoints of `Client`: upload and list models, build and list engines."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from gpufn.client.http import JSON_BODY, MANAGE_TIMEOUT_S, Requests
from gpufn.client.views.models import BuildView, CollectedEngines, EngineView, ModelView
from gpufn_core.encoding import media
from gpufn_core.encoding.urls import segment
from gpufn_core.spec.model_spec import ModelSpec

_UPLOAD_CHUNK_BYTES = 1 << 20


class ModelRequests(Requests):
    """Model, build and engine endpoints."""

    def put_artifact(self, digest: str, path: Path, *, sent: Callable[[int], None] | None = None) -> bool:
        """Upload a model's file unless the gateway has it. Return False if it had.

        `sent` receives the number of bytes sent so far.
        """
        artifact_path = f"/v1/artifacts/{segment(digest)}"
        if self._exists(artifact_path):
            return False
        headers = {"content-type": media.BYTES, "content-length": str(path.stat().st_size)}
        content = _FileContent(path, sent)
        self._request("PUT", artifact_path, content=content, headers=headers, timeout=self._no_timeout)
        return True

    def create_build(self, model: ModelSpec, device: str | None = None) -> BuildView:
        """Build engines of a model whose files are uploaded, for a device kind (default: the nodes' CPUs)."""
        body = msgspec.json.encode({"model": model} | ({"device": device} if device else {}))
        return self._json(BuildView, "POST", "/v1/builds", content=body, headers=JSON_BODY)

    def builds(self) -> list[BuildView]:
        """List the builds, newest first."""
        return self._member(list[BuildView], "builds", "GET", "/v1/builds")

    def build(self, id: str, *, wait_s: float = 0.0, since: int | None = None) -> BuildView:  # noqa: A002
        """Return a build's state, after waiting at most `wait_s` (limit: 60) for its next change.

        `since` is the `change` of the last view; without it, the next change from now on counts. Raises BuildNotFound.
        """
        params = {"wait": f"{wait_s:g}"} | ({} if since is None else {"since": str(since)})
        timeout_s = MANAGE_TIMEOUT_S + wait_s
        return self._json(BuildView, "GET", f"/v1/builds/{segment(id)}", params=params, timeout=timeout_s)

    def build_report(self, id: str, *, page: bool = False) -> bytes:  # noqa: A002
        """Return a build's report of engines, accuracy and latency, as JSON or, with `page`, as HTML."""
        return self._request("GET", f"/v1/builds/{segment(id)}/report{'.html' if page else ''}").content

    def engines(self) -> list[EngineView]:
        """List the engines, newest first."""
        return self._member(list[EngineView], "engines", "GET", "/v1/engines")

    def collect_engines(self, *, dry_run: bool = False) -> CollectedEngines:
        """Remove the engines that no function and no build uses. With `dry_run`, only list them."""
        body = msgspec.json.encode({"dry_run": dry_run})
        return self._json(CollectedEngines, "POST", "/v1/engines/gc", content=body, headers=JSON_BODY)

    def models(self) -> list[ModelView]:
        """List the models of the revisions that serve."""
        return self._member(list[ModelView], "models", "GET", "/v1/models")

    def model(self, name: str) -> ModelView:
        """Return a model: `NAME`, or `FUNCTION.PARAMETER` for a model in a function. Raises FunctionNotFound."""
        return self._json(ModelView, "GET", f"/v1/models/{self._function_path(name)}")

    def cancel_build(self, id: str) -> BuildView:  # noqa: A002
        """Request the cancellation of a build. Revisions that wait for it fail."""
        return self._json(BuildView, "DELETE", f"/v1/builds/{segment(id)}")


class _FileContent:
    """A file as a request body. Each attempt reads it from the start."""

    def __init__(self, path: Path, sent: Callable[[int], None] | None) -> None:
        self._path = path
        self._sent = sent

    def __iter__(self) -> Iterator[bytes]:
        count = 0
        with self._path.open("rb") as file:
            while chunk := file.read(_UPLOAD_CHUNK_BYTES):
                yield chunk
                count += len(chunk)
                if self._sent is not None:
                    self._sent(count)
