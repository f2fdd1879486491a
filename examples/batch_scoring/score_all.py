"""Score all row groups of a file in the volume `orders`, or continue after this program was killed:
python score_all.py orders.parquet"""

from __future__ import annotations

import sys
from pathlib import Path

import pyarrow.parquet as pq

from gpufn import Function


def main(path: str) -> None:
    state = Path(f"{path}.map")  # the id of the map, until it is complete
    earlier = state.read_text() if state.exists() else None
    if earlier:
        print("continues the map", earlier)
    parts = range(pq.ParquetFile(path).num_row_groups)
    found = Function.from_name("score").map(parts, id=earlier, progress=True)
    if found.id:  # a map of a few items has none: they are plain calls
        state.write_text(found.id)
    print(f"{sum(found):,} suspicious orders in {len(parts)} row groups")
    state.unlink(missing_ok=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
