"""Write invented orders, in row groups of 10,000: python make_orders.py orders.parquet [ROWS]"""

from __future__ import annotations

import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

_GROUP = 10_000


def main(path: str, rows: str = "1000000") -> None:
    rng, count = np.random.default_rng(7), int(rows)
    orders = {
        "order": np.arange(count),
        "amount": rng.lognormal(3.5, 1.0, count).round(2) + 0.01,
        "items": rng.integers(1, 12, count),
        "account_days": rng.exponential(400, count).astype(np.int64),
    }
    pq.write_table(pa.table(orders), path, row_group_size=_GROUP)
    print(f"wrote {path}, {count:,} orders")


if __name__ == "__main__":
    main(*sys.argv[1:])
