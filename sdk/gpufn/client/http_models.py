"""Models over HTTP: the part of `Client` that uploads them, builds their engines and lists both."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from gpufn.client.http import JSON_BODY, MANAGE_TIMEOUT_S, Requests
from gpufn.client.views import Builds, BuildView, Collected, Engines, EngineView, Models, ModelView
from gpufn_core.encoding import media
from gpufn_core.encoding.urls import segment
from gpufn_core.spec.model_spec import ModelSpec

_CHUNK_BYTES = 1 << 20  # of an upload


class ModelRequests(Requests):
    """The endpoints of models, builds and engines."""

    def put_artifact(self, digest: str, path: Path, *, sent: Callable[[int], None] | None = None) -> bool:
        """Upload a model's file unless it is there; False when it was. `sent` gets the bytes so far."""
        where = f"/v1/artifacts/{segment(digest)}"
        if self._exists(where):
            return False
        headers = {"content-type": media.BYTES, "content-length": str(path.stat().st_size)}
        content = _FileContent(path, sent)
        self._request("PUT", where, content=content, headers=headers, timeout=self._endless)
        return True

    def create_build(self, model: ModelSpec, device: str | None = None) -> BuildView:
        """Build engines of a model whose files have been uploaded; without `device`, for the nodes' CPUs."""
        body = msgspec.json.encode({"model": model} | ({"device": device} if device else {}))
        return self._json(BuildView, "POST", "/v1/builds", content=body, headers=JSON_BODY)

    def builds(self) -> list[BuildView]:
        """Every build, the newest first."""
        return self._json(Builds, "GET", "/v1/builds").builds

    def build(self, id: str, *, wait_s: float = 0.0, since: int | None = None) -> BuildView:  # noqa: A002
        """How a build stands: at its next change, after the one that `since` names (a view's `change`) or else from
        now, or after `wait_s`, which is 60 at most. Raises BuildNotFound."""
        params = {"wait": f"{wait_s:g}"} | ({} if since is None else {"since": str(since)})
        timeout_s = MANAGE_TIMEOUT_S + wait_s
        return self._json(BuildView, "GET", f"/v1/builds/{segment(id)}", params=params, timeout=timeout_s)

    def build_report(self, id: str, *, page: bool = False) -> bytes:  # noqa: A002
        """What was built, compared and measured: as JSON, or as a `page` of HTML."""
        return self._request("GET", f"/v1/builds/{segment(id)}/report{'.html' if page else ''}").content

    def engines(self) -> list[EngineView]:
        """Every engine, the newest first."""
        return self._json(Engines, "GET", "/v1/engines").engines

    def collect_engines(self, *, dry_run: bool = False) -> Collected:
        """Remove the engines that no function and no build uses; with `dry_run`, only say which."""
        body = msgspec.json.encode({"dry_run": dry_run})
        return self._json(Collected, "POST", "/v1/engines/gc", content=body, headers=JSON_BODY)

    def models(self) -> list[ModelView]:
        """The models of every function, as it serves."""
        return self._json(Models, "GET", "/v1/models").models

    def model(self, name: str) -> ModelView:
        """One model: `NAME`, or `FUNCTION.PARAMETER` for one inside a function. Raises FunctionNotFound."""
        return self._json(ModelView, "GET", f"/v1/models/{segment(name)}")

    def cancel_build(self, id: str) -> BuildView:  # noqa: A002
        """Ask for its end; what waits for it fails."""
        return self._json(BuildView, "DELETE", f"/v1/builds/{segment(id)}")


class _FileContent:
    """A file as a request's body; each try reads it from its beginning."""

    def __init__(self, path: Path, sent: Callable[[int], None] | None) -> None:
        self._path = path
        self._sent = sent

    def __iter__(self) -> Iterator[bytes]:
        count = 0
        with self._path.open("rb") as file:
            while chunk := file.read(_CHUNK_BYTES):
                yield chunk
                count += len(chunk)
                if self._sent is not None:
                    self._sent(count)
