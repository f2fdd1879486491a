from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gpufn import Client
from tests.conftest import ROOT, Platform
from tests.examples.conftest import deploy, imported
from tests.waiting import until

pytestmark = pytest.mark.e2e

FOLDER = ROOT / "examples" / "batch_scoring"
ROWS, GROUPS = 115_000, 12


def test_a_killed_program_continues_its_map_and_each_order_has_one_score(platform: Platform, tmp_path: Path) -> None:
    import pyarrow.dataset
    import pyarrow.parquet

    orders, state = tmp_path / "orders.parquet", tmp_path / "orders.parquet.map"
    with imported(FOLDER, "make_orders") as make_orders:
        make_orders.main(str(orders), str(ROWS))
    platform.gpufn("volume", "put", "orders", orders)
    deploy(platform, "batch_scoring", "pyarrow", "numpy")

    with Client(platform.url) as client:
        client.scale("score", None, 0)  # so the program cannot end before it is killed
        until(lambda: platform.ready_workers("score") == 0)
        program = _start(platform, orders)
        id_ = until(lambda: state.exists() and state.read_text())
        program.kill()
        program.communicate()
        client.scale("score", None, None)
    said, _ = _start(platform, orders).communicate()
    assert f"continues the map {id_}" in said
    assert f"in {GROUPS} row groups" in said
    assert not state.exists()

    platform.gpufn("volume", "get", "scores", "--to", tmp_path / "scores")
    scores = pyarrow.dataset.dataset(tmp_path / "scores").to_table()
    assert sorted(scores["order"].to_pylist()) == list(range(ROWS))
    suspicious = int((scores["risk"].to_numpy() > 0.5).sum())
    assert f"{suspicious:,} suspicious orders" in said
    assert suspicious > 0


def _start(platform: Platform, orders: Path) -> subprocess.Popen[str]:
    environ = os.environ | {"GPUFN_URL": platform.url, "GPUFN_HOME": str(platform.home)}
    command = [sys.executable, str(FOLDER / "score_all.py"), str(orders)]
    return subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True)
