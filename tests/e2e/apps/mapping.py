"""A client that a test kills. It prints the map's id, then cursors and values. Arguments: the file of `noted`."""

from __future__ import annotations

import sys

from tests.e2e.apps.mapped import noted

path = sys.argv[1]
results = noted.starmap(((path, number) for number in range(100_000)), window=400)
print(results.id, flush=True)
for value in results:
    print(results.cursor, value, flush=True)
