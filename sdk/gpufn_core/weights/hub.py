"""URLs of the Hugging Face Hub, from the variables that huggingface_hub reads. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import quote, urlsplit

from gpufn_core.weights.credentials import header_value

_ENDPOINT = "https://huggingface.co"


@dataclass(frozen=True)
class Hub:
    """HF_ENDPOINT   the address of the hub, or of a mirror
    HF_TOKEN      the token for private and gated repositories
    """

    endpoint: str = _ENDPOINT
    token: str = field(default="", repr=False)

    @classmethod
    def from_env(cls, environ: Mapping[str, str]) -> Hub:
        """Raises ArtifactUnavailable if the token is none."""
        return cls((environ.get("HF_ENDPOINT") or _ENDPOINT).rstrip("/"), header_value(environ, "HF_TOKEN"))

    @property
    def headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.token}"} if self.token else {}

    def has(self, url: str) -> bool:
        """Return whether `url` is of this hub, which may receive the token.

        >>> [Hub("https://hub/a").has(url) for url in ("https://hub/b", "https://hub.other/", "http://hub/", "https://hub:8/")]
        [True, False, False, False]
        """
        return urlsplit(url)[:2] == urlsplit(self.endpoint)[:2]

    def revision_url(self, repository: str, revision: str) -> str:
        """Return the URL of a revision's description, which has the commit as `sha`."""
        return f"{self.endpoint}/api/models/{repository}/revision/{quote(revision, safe='')}"

    def tree_url(self, repository: str, commit: str) -> str:
        """Return the URL of the first page of the list of files."""
        return f"{self.endpoint}/api/models/{repository}/tree/{commit}?recursive=true"

    def file_url(self, repository: str, commit: str, path: str) -> str:
        return f"{self.endpoint}/{repository}/resolve/{commit}/{quote(path)}"
