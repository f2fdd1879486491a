"""Scores for a large Parquet file: a map over its row groups, and a part of the result for each."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from gpufn import Batch, Retry, Volume, gpu_function

ORDERS = Volume("orders")  # orders.parquet
SCORES = Volume("scores", writable=True)  # part-00000.parquet and so on: together one data set

# A stand-in for a trained model: a logistic regression on the logarithm of the amount, the items, and the age in days.
_INTERCEPT, _AMOUNT, _ITEMS, _AGE = -6.0, 1.1, -0.25, -0.004


@gpu_function(volumes=[ORDERS, SCORES], batch=Batch(max_size=8, max_wait_ms=50), retries=Retry(3), idle_timeout=30)
def score(part: list[int]) -> list[int]:
    """Score row groups, and commit their results. Returns the number of suspicious orders in each.

    A batch shares one commit. A row group that is scored twice, after a crash, writes the same file again.
    """
    file = pq.ParquetFile(ORDERS.path / "orders.parquet")
    found = []
    for number in part:
        table = file.read_row_group(number, columns=["order", "amount", "items", "account_days"])
        risk = _risk(table)
        scored = pa.table({"order": table["order"], "risk": risk})
        pq.write_table(scored, SCORES.draft / f"part-{number:05}.parquet")
        found.append(int((risk > 0.5).sum()))
    SCORES.commit()
    return found


def _risk(table: pa.Table) -> NDArray[np.float32]:
    amount, items, age = (table[name].to_numpy() for name in ("amount", "items", "account_days"))
    risk: NDArray[np.float32] = 1 / (1 + np.exp(-(_INTERCEPT + _AMOUNT * np.log(amount) + _ITEMS * items + _AGE * age)))
    return risk.astype(np.float32)
