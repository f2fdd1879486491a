"""Search by meaning: documents become vectors in a volume, and a class searches them."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import numpy as np
from numpy.typing import NDArray

from gpufn import Batch, Function, Retry, Volume, enter, gpu_function, method

INDEX = Volume("passages", writable=True)  # a folder per document: passages.json and vectors.npy
EMBED = Function.from_name("embed")  # deployed from examples/embeddings
_DIMENSIONS = 384
_LONGEST = 700  # characters of a passage: the model reads 256 tokens


class Passage(msgspec.Struct):
    document: str
    heading: str
    text: str


class Hit(msgspec.Struct):
    score: float
    passage: Passage


@gpu_function(volumes=INDEX, max_workers=2, idle_timeout=10, retries=Retry(2))
def add(name: str, text: str) -> int:
    """Put a document into the index, in the place of an earlier one of this name. Returns its number of passages."""
    if "/" in name or name in {"", ".", ".."}:
        raise ValueError(f"{name!r} is not the name of a document: it becomes the name of a folder")
    passages = list(split(name, text))
    vectors = np.array(EMBED.remote(texts=[f"{each.heading}: {each.text}" for each in passages]), np.float16)
    folder = INDEX.draft / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "passages.json").write_bytes(msgspec.json.encode(passages))
    np.save(folder / "vectors.npy", vectors.reshape(-1, _DIMENSIONS))
    INDEX.commit()
    return len(passages)


@gpu_function(volumes=INDEX, concurrency=1, idle_timeout=10)
class Search:
    @enter
    def load(self) -> None:
        """Read all documents: those that were in the volume when this worker started."""
        folders = sorted(path.parent for path in INDEX.path.glob("**/vectors.npy"))
        self._passages = [
            passage
            for folder in folders
            for passage in msgspec.json.decode((folder / "passages.json").read_bytes(), type=list[Passage])
        ]
        vectors = [np.load(folder / "vectors.npy") for folder in folders]
        self._vectors: NDArray[np.float32] = np.concatenate(vectors or [np.zeros((0, _DIMENSIONS))]).astype(np.float32)
        print(f"{len(self._passages)} passages of {len(folders)} documents, version {INDEX.version}")

    @method(batch=Batch(max_size=32, max_wait_ms=5))
    def search(self, query: list[str], top: list[int]) -> list[list[Hit]]:
        """Return the `top` nearest passages, the best one first. The queries of a batch share one run of the model."""
        scores = np.array(EMBED.remote(texts=query), np.float32) @ self._vectors.T
        return [
            [Hit(round(float(row[place]), 3), self._passages[place]) for place in np.argsort(-row)[:count]]
            for row, count in zip(scores, top, strict=True)
        ]


def split(name: str, text: str) -> Iterator[Passage]:
    """Yield the passages of a Markdown text: paragraphs that share a heading, together up to 700 characters."""
    heading, gathered = name, ""
    for paragraph in filter(None, map(str.strip, text.split("\n\n"))):
        is_heading = paragraph.startswith("#")
        if gathered and (is_heading or len(gathered) + len(paragraph) > _LONGEST):
            yield Passage(name, heading, gathered)
            gathered = ""
        if is_heading:
            heading = paragraph.lstrip("# ")
        else:
            gathered = f"{gathered}\n\n{paragraph}".strip()
    if gathered:
        yield Passage(name, heading, gathered)
