"""Count which word follows which in a text, and write the counts to bigrams.json: the weights of the example."""

import itertools
import json
import re
import sys
from collections import Counter, defaultdict
from pathlib import Path

HERE = Path(__file__).parent


def count(text: str) -> dict[str, dict[str, int]]:
    words = re.findall(r"[a-z']+", text.lower())
    following: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for word, follower in itertools.pairwise(words):
        following[word][follower] += 1
    return {word: dict(counts) for word, counts in following.items()}


if __name__ == "__main__":
    sources = [Path(name) for name in sys.argv[1:]] or [HERE / "README.md"]
    text = " ".join(source.read_text() for source in sources)
    path = HERE / "bigrams.json"
    path.write_text(json.dumps(count(text)))
    print(f"wrote {path.name}, {path.stat().st_size:,} bytes")
